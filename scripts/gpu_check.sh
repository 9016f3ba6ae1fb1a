#!/usr/bin/env bash
# Checks and times the CUDA paths on a machine with one or more GPUs, in about 10 minutes, with the Python that is
# active (torch >= 2.11 with CUDA, and this package's dependencies; `. .venv/bin/activate` first, or set PYTHON).
# Results go to outputs/gpu_check: copy the figures of summary.json into docs/benchmarks.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
out=outputs/gpu_check
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

"$python" - <<'PYTHON'
import torch

import regdrop_titan  # noqa: F401
from regdrop_titan.models.attention import AttentionContext, flex_attention_with_slopes, sdpa_attention
from regdrop_titan.models.positions import attention_bias, causal_block_mask, head_slopes, head_windows, nape_slopes

assert torch.cuda.is_available(), "no GPU here"
print(torch.__version__, torch.cuda.get_device_name())
# FlexAttention, forward and backward, against SDPA with the bias; 1025 is no multiple of its block. The last windows are
# those of heads that are cut at 10 and 40 nats
cuda = torch.device("cuda")
for S in (256, 1025, 2048):
    cut = [head_windows(head_slopes("nape", "inverse", 12), cutoff, None, S) for cutoff in (10.0, 40.0)]
    for window in (None, 200, *cut):
        q, k, v = (torch.randn(2, 12, S, 64, device=cuda, requires_grad=True) for _ in range(3))
        slopes = nape_slopes(12)
        bias = attention_bias(tuple(slopes.tolist()), window, S, cuda)
        context = AttentionContext(slopes=slopes.to(cuda), block_mask=causal_block_mask(window, S, cuda))
        grad = torch.randn_like(q)
        results = []
        for out in (sdpa_attention(q, k, v, AttentionContext(bias=bias)), flex_attention_with_slopes(q, k, v, context)):
            results.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
        for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            error = ((a - b).norm() / a.norm()).item()
            assert error < 5e-3, (S, window, name, error)
        print(f"FlexAttention S={S} window={window}: agrees")

# Mamba2's scan by fla-core's kernels against plain PyTorch in fp64: fp32 to 1e-3, bf16 as that rounds
from regdrop_titan.models.scan import chunked_scan, kernel_scan  # noqa: E402

for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
    for S in (1, 65, 1024):
        n, H, P, G, N = 2, 24, 64, 1, 128
        x, B, C = (torch.randn(n, S, *shape, device=cuda) for shape in ((H, P), (G, N), (G, N)))
        dt, A = torch.nn.functional.softplus(torch.randn(n, S, H, device=cuda) - 3), -torch.rand(H, device=cuda) * 15 - 1
        state, starts = torch.randn(n, H, P, N, device=cuda), torch.rand(n, S, device=cuda) < 0.01
        d_y = torch.randn_like(x)
        results = []
        for scan, chunk in ((kernel_scan, ()), (chunked_scan, (64,))):
            working = dtype if scan is kernel_scan else torch.float64
            inputs = [t.to(dtype).to(working) for t in (x, B, C)] + [t.to(torch.promote_types(working, torch.float32))
                                                                     for t in (dt, A, state)]  # fmt: skip
            u, b, c, step, a, h = (t.clone().requires_grad_() for t in inputs)
            y, final = scan(u, step, a, b, c, *chunk, h, starts)
            gradients = torch.autograd.grad((y * d_y.to(y.dtype)).sum() + final.sum(), (u, step, a, b, c, h))
            results.append([y, final, *gradients])
        error = max(((k - e).norm() / e.norm()).item() for k, e in zip(*results, strict=True))
        assert error < bound, (dtype, S, error)
        print(f"scan kernels {dtype} S={S}: error {error:.1e}")

# Reading in pieces with a cache against reading all at once
from regdrop_titan.models import build_model  # noqa: E402
from regdrop_titan.models.cache import Cache  # noqa: E402

torch.backends.cuda.matmul.allow_tf32 = False
for family in ("nape_llama3", "smollm3", "celerity", "mamba2"):
    model = build_model(family, "debug").eval().cuda()
    tokens = torch.randint(2048, (2, 700), device=cuda)
    cache = Cache(2, 700, chunk=256)
    with torch.no_grad():
        pieces = [model(tokens[:, i : i + 256], cache=cache) for i in (0, 256, 512)]
        error = (torch.cat(pieces, dim=1) - model(tokens)).abs().max().item()
    assert error < 1e-2, (family, error)  # the scan's kernels round to 1e-3
    print(f"cache {family}: error {error:.1e}")

# Greedy decoding with compiled blocks, plainly and with a draft, against eager blocks: time, and the same tokens. Rounding
# may part two texts where two tokens are nearly as likely, so that the first 8 must be the same
import time  # noqa: E402

from regdrop_titan.generation import generate  # noqa: E402

for family, flavor in (("nape_llama3", "400M"), ("mamba2", "85M")):
    model = build_model(family, flavor, vocab_size=32000).eval().cuda()
    prompts = [torch.randint(32000, (n,), device=cuda) for n in (200, 500)]
    draft = {"draft_layers": range(0, model.args.n_layers, 2), "draft_length": 4}
    for options in ({}, draft):
        answers, seconds = [], []
        for compiled in (False, True):
            for _ in range(3):
                torch.cuda.synchronize()
                began = time.perf_counter()
                answers.append(generate(model, prompts, 64, **options, compile=compiled)[0])
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)  # of the last of three
        assert all(torch.equal(a[:8], b[:8]) for a, b in zip(answers[0], answers[-1], strict=True)), family
        print(f"generation {family} {'with a draft' if options else 'plain'}: eager {128 / seconds[0]:.0f} tokens/s, "
              f"compiled {128 / seconds[1]:.0f}")  # fmt: skip
PYTHON

common=(--training.steps 20 --metrics.log_freq 5 --training.mixed_precision_param bfloat16 --compile.enable)
"$python" -m torch.distributed.run --standalone --nproc_per_node=1 train.py \
    --job.config_file train_configs/debug_nape_llama3.toml --job.dump_folder "$out/debug" "${common[@]}"
for placement in none vpad; do
    "$python" -m torch.distributed.run --standalone --nproc_per_node=1 train.py \
        --job.config_file train_configs/debug_nape_llama3.toml --job.dump_folder "$out/400m_$placement" "${common[@]}" \
        --model.flavor 400M --training.seq_len 2048 --training.local_batch_size 8 --training.global_batch_size 8 \
        --dropout.placement "$placement" --checkpoint.no-enable --validation.no-enable
done
"$python" -m torch.distributed.run --standalone --nproc_per_node=1 train.py \
    --job.config_file train_configs/debug_mamba2.toml --job.dump_folder "$out/mamba2_85m" "${common[@]}" \
    --model.flavor 85M --architecture.chunk_size 256 --training.seq_len 1024 --training.local_batch_size 16 \
    --training.global_batch_size 16 --checkpoint.no-enable --validation.no-enable
"$python" scripts/evaluate.py position-loss --checkpoint "$out/debug/checkpoint" --data data/stdlib/long
"$python" scripts/evaluate.py moments --checkpoint "$out/debug/checkpoint" --data data/stdlib/validation
"$python" scripts/benchmark.py mamba2 --layers 4 --batch-size 8 --chunks 64 128 256 --compile \
    --output "$out/mamba2_compiled.json"
"$python" scripts/benchmark.py dense --layers 12 --seq-len 2048 --batch-size 8 --output "$out/dense_eager.json"
"$python" scripts/benchmark.py dense --layers 12 --seq-len 2048 --batch-size 8 --compile --output "$out/dense_compiled.json"

"$python" scripts/benchmark.py loss --seq-len 2048 --pieces 0 4 64 --output "$out/loss.json"
"$python" scripts/benchmark.py attention --batch-size 8 --output "$out/attention_2k.json"
"$python" scripts/benchmark.py attention --batch-size 2 --seq-len 8192 --output "$out/attention_8k.json"
"$python" scripts/benchmark.py layer-dropout --dim 1024 --layers 12 --seq-len 2048 --output "$out/layer_dropout_eager.json"
"$python" scripts/benchmark.py layer-dropout --dim 1024 --layers 12 --seq-len 2048 --compile \
    --output "$out/layer_dropout_compiled.json"

"$python" - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
summary = {}
for run in ("debug", "400m_none", "400m_vpad", "mamba2_85m"):
    last = json.loads((out / run / "metrics.jsonl").read_text().splitlines()[-1])
    summary[run] = {key: last.get(key) for key in ("step", "loss", "tokens_per_second", "mfu", "memory_gib")}
timings = ("dense_eager", "dense_compiled", "layer_dropout_eager", "layer_dropout_compiled", "mamba2_compiled")
for name in (*timings, "loss", "attention_2k", "attention_8k"):
    rows = json.loads((out / f"{name}.json").read_text())["rows"]
    summary[name] = {key: round(row["ratio"], 3) for key, row in rows.items()}
rows = json.loads((out / "loss.json").read_text())["rows"]
summary["loss_peak_mib"] = {key: round(row["peak_mib"]) for key, row in rows.items()}
(out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
print(json.dumps(summary, indent=2))
PYTHON
