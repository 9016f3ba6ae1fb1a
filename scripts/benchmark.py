"""Paired step timings, as ratios.

    python scripts/benchmark.py dense [--compile]
    python scripts/benchmark.py layer-dropout [--compile]
    torchrun --nproc_per_node=2 scripts/benchmark.py layer-dropout
    python scripts/benchmark.py stragglers [--against outputs/benchmark_layer-dropout.json]
    python scripts/benchmark.py mamba2 [--compile]
    python scripts/benchmark.py generation
    python scripts/benchmark.py loss
    python scripts/benchmark.py attention [--checkpoint DIR --data SET --lengths 2048 65536]
    python scripts/benchmark.py data [--tokenizer DIR]
    python scripts/benchmark.py all

Variants take turns, one step each a round, so that a drift of the machine's speed meets all of them alike; a ratio is
the median over rounds of the pairwise ratios. A dense step is forward, loss, backward and a fused AdamW update; a
layer-dropout or mamba2 step is forward and backward of a stack of blocks; a generation step reads prompts and writes
greedy answers with a cache; a loss step is forward and backward of head and loss, an attention step of one attention
layer. The data benchmark sets preparation beside the bare tokenizer, and reads a packed set as training does. `all`
runs those whose ratios have a bound, and ends with status 1 where one is above its own.
"""

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.huggingface import export_huggingface
from regdrop_titan.checkpoints.loading import model_args_of, resolve_checkpoint
from regdrop_titan.config.sections import PIECE_OF_LOGITS
from regdrop_titan.data import PackedDataset
from regdrop_titan.data.loader import TrainingLoader
from regdrop_titan.data.mixture import Mixture
from regdrop_titan.data.preparation import prepare
from regdrop_titan.data.stdlib_corpus import stdlib_sources
from regdrop_titan.data.tokenizers import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer, train_tokenizer
from regdrop_titan.distributed.stragglers import LayerTime, simulate, step_seconds
from regdrop_titan.generation import generate
from regdrop_titan.models import FAMILIES, Decoder, build_model
from regdrop_titan.models.cache import Cache, piece_length
from regdrop_titan.models.head import Head
from regdrop_titan.regularization import keep_mask, layer_rates
from regdrop_titan.signals import interruptible

Step = Callable[[], None]


def make_step(model: torch.nn.Module, tokens: torch.Tensor, compiled: bool) -> Step:
    """One training step of `model` on a fixed batch; bf16 autocast on CUDA, fp32 on CPU."""
    device = tokens.device
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if compiled:
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")

    def step() -> None:
        with autocast:
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def time_rounds(steps: dict[str, Step], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Seconds of each variant's step, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in tqdm(range(warmup + rounds), desc="rounds", unit="round", disable=os.environ.get("RANK", "0") != "0"):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile over rounds of variant `name`'s time over `base`'s."""
    ratios = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return middle, low, high


def dense(arguments: argparse.Namespace) -> dict:
    """TorchTitan's Llama-3 beside our decoder at equal sizes, then NAPE, each placement and attention variant."""
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    d, layers, heads, S = arguments.dim, arguments.layers, arguments.dim // 64, arguments.seq_len
    tokens = torch.randint(0, arguments.vocab_size, (arguments.batch_size, S + 1), device=device)
    titan_args = TransformerModelArgs(
        dim=d, n_layers=layers, n_heads=heads, vocab_size=arguments.vocab_size, max_seq_len=S, rope_theta=500000
    )
    titan = Transformer(titan_args)
    with torch.no_grad():
        titan.init_weights()
    ffn_dim = titan.layers["0"].feed_forward.w1.out_features

    def ours(position: str, placement: str = "none", **overrides) -> torch.nn.Module:
        return build_model(
            "nape_llama3", "debug", dim=d, n_layers=layers, n_heads=heads, n_kv_heads=heads, ffn_dim=ffn_dim,
            vocab_size=arguments.vocab_size, position=position, placement=placement, p=arguments.p, **overrides,
        )  # fmt: skip

    models = {
        "torchtitan llama3": titan,
        "rope": ours("rope"),
        "nape": ours("nape"),
        "nape pre_norm": ours("nape", "pre_norm"),
        "nape pre_linear": ours("nape", "pre_linear"),
        "nape vpad": ours("nape", "vpad"),
        "nape vpad per_linear": ours("nape", "vpad", mask="per_linear"),
        "nape adaptive": ours("nape", scaling="adaptive"),
        "nape ssmax": ours("nape", scaling="ssmax"),
        "nape entmax15": ours("nape", attention="entmax15"),
        "nape attention_p": ours("nape", attention_p=arguments.p),
    }
    steps = {name: make_step(model, tokens, arguments.compile) for name, model in models.items()}
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    tokens_a_step = arguments.batch_size * S
    rows = {}
    print(f"{'variant':<22}{'ms a step':>11}{'tokens/s':>11}   ratio [quartiles] to")
    for name in models:
        base = "torchtitan llama3" if name in ("torchtitan llama3", "rope", "nape") else "nape"
        middle, low, high = ratio(seconds, name, base)
        median = statistics.median(seconds[name])
        rows[name] = {"seconds": median, "ratio": middle, "quartiles": [low, high], "base": base}
        figures = f"{1000 * median:>11.1f}{tokens_a_step / median:>11,.0f}   {middle:.3f} [{low:.3f}, {high:.3f}]"
        print(f"{name:<22}{figures} {base}")
    return {"rows": rows, "seconds": seconds}


def mamba2(arguments: argparse.Namespace) -> dict:
    """transformers' Mamba2 layers, on its torch path, beside ours at several chunk sizes; forward and backward."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Block

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    d, L = arguments.dim, arguments.layers
    x = torch.randn(arguments.batch_size, arguments.seq_len, d, device=device)

    def step_of(layers: Callable[[torch.Tensor], torch.Tensor], parameters: list[torch.nn.Parameter]) -> Step:
        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                out = layers(x)
            out.float().square().mean().backward()
            for parameter in parameters:
                parameter.grad = None
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return step

    config = Mamba2Config(
        hidden_size=d, num_hidden_layers=L, vocab_size=64, head_dim=64, num_heads=2 * d // 64, state_size=128,
        n_groups=1, chunk_size=256,
    )  # fmt: skip
    theirs = torch.nn.Sequential(*(Mamba2Block(config, i) for i in range(L))).to(device)
    steps = {"transformers": step_of(theirs, list(theirs.parameters()))}
    for chunk in arguments.chunks:
        model = build_model("mamba2", "debug", dim=d, n_layers=L, vocab_size=64, chunk_size=chunk).to(device)
        blocks = list(model.layers.values())
        run = [torch.compile(block, fullgraph=True) if arguments.compile else block for block in blocks]

        def layers(h: torch.Tensor, blocks=blocks, run=run) -> torch.Tensor:
            for block, forward in zip(blocks, run, strict=True):
                h = forward(h, block.own_context(block.context(h.shape[1], h.device, None), ""))
            return h

        steps[f"ours, chunk {chunk}"] = step_of(layers, list(model.parameters()))
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    print(f"{'variant':<20}{'ms a step':>11}   time to transformers' [quartiles]")
    for name in steps:
        middle, low, high = ratio(seconds, name, "transformers")
        median = statistics.median(seconds[name])
        rows[name] = {"seconds": median, "ratio": middle, "quartiles": [low, high]}
        print(f"{name:<20}{1000 * median:>11.1f}   {middle:.3f} [{low:.3f}, {high:.3f}]")
    return {"rows": rows, "seconds": seconds}


def generation(arguments: argparse.Namespace) -> dict:
    """transformers' greedy generation from our export beside ours, and a prompt read in pieces beside one forward."""
    from transformers import AutoModelForCausalLM

    d = arguments.dim
    model = build_model(
        arguments.family, "debug", dim=d, n_layers=arguments.layers, n_heads=d // 64, n_kv_heads=d // 64, ffn_dim=3 * d
    ).eval()  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        export_huggingface(model, Path(temporary) / "model")
        theirs = AutoModelForCausalLM.from_pretrained(
            Path(temporary) / "model", trust_remote_code=True, dtype=torch.float32
        ).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, theirs = model.to(device), theirs.to(device)
    B, S, N = arguments.batch_size, arguments.seq_len, arguments.new_tokens
    prompts = torch.randint(1, model.args.vocab_size, (B, S), device=device)
    mask = torch.ones_like(prompts)
    options = {"max_new_tokens": N, "min_new_tokens": N, "do_sample": False, "pad_token_id": 0}

    @torch.no_grad()
    def pieces() -> None:
        cache = Cache(B, S, piece_length(model.args, B, S))
        for start in range(0, S, cache.chunk):
            model(prompts[:, start : start + cache.chunk], cache=cache)

    steps: dict[str, Step] = {
        "transformers": lambda: theirs.generate(prompts, attention_mask=mask, **options),
        "ours": lambda: generate(model, list(prompts), N),
        "one forward": torch.no_grad()(lambda: model(prompts)),
        "in pieces": pieces,
    }
    answers = theirs.generate(prompts, attention_mask=mask, **options)[:, S:]
    same = torch.equal(answers.cpu(), torch.stack(generate(model, list(prompts), N)[0]))
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    print(f"{'variant':<20}{'ms a step':>11}   time to the other's [quartiles]; same tokens: {same}")
    for name, base in (("ours", "transformers"), ("in pieces", "one forward")):
        middle, low, high = ratio(seconds, name, base)
        median = statistics.median(seconds[name])
        rows[f"{name} / {base}"] = {"seconds": median, "ratio": middle, "quartiles": [low, high]}
        print(f"{name:<20}{1000 * median:>11.1f}   {middle:.3f} [{low:.3f}, {high:.3f}]")
    return {"rows": rows, "seconds": seconds, "same_tokens": same}


def stack_of_blocks(d: int, n_layers: int, position: str, **overrides) -> Decoder:
    """A decoder whose embedding and head are next to nothing."""
    return build_model(
        "nape_llama3", "debug", dim=d, n_layers=n_layers, n_heads=d // 64, n_kv_heads=d // 64, ffn_dim=4 * d,
        vocab_size=64, position=position, **overrides,
    )  # fmt: skip


def attention(arguments: argparse.Namespace) -> dict:
    """Attention layers whose ALiBi heads are cut (architecture.alibi_cutoff) beside those with the whole bias and plain
    causal ones: time, the cache's memory, and with --checkpoint the error of its logits."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    d, S = arguments.dim, arguments.seq_len
    x = torch.randn(arguments.batch_size, S, d, device=device, requires_grad=True)
    gradient = torch.randn_like(x)

    def model_of(**overrides) -> torch.nn.Module:
        model = build_model(
            "nape_llama3", "debug", dim=d, n_layers=1, n_heads=d // 64, n_kv_heads=d // 64, vocab_size=64, **overrides
        )
        return model.to(device)

    def step_of(**overrides) -> Step:
        layer = model_of(**overrides).layers["0"].attention.inner
        context = layer.context(S, device, None)
        forward = torch.compile(layer, fullgraph=True) if arguments.compile else layer

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                out = forward(x, context=context)
            out.backward(gradient.to(out.dtype))
            x.grad = None
            for parameter in layer.parameters():
                parameter.grad = None
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return step

    alibi = {"position": "alibi", "slopes": "press"}
    steps = {
        "causal": step_of(position="nope"),
        "nape, whole": step_of(alibi_cutoff=0.0),
        "nape, cut": step_of(alibi_cutoff=arguments.cutoff),
        "alibi, whole": step_of(**alibi, alibi_cutoff=0.0),
        "alibi, cut": step_of(**alibi, alibi_cutoff=arguments.cutoff),
    }
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    print(f"{'layer':<14}{'ms a step':>11}   ratio [quartiles] to")
    for name in steps:
        median = statistics.median(seconds[name])
        uncut = name.replace("cut", "whole")
        for base in ["causal"] + [uncut] * (uncut != name):
            middle, low, high = ratio(seconds, name, base)
            rows[f"{name} / {base}"] = {"seconds": median, "ratio": middle, "quartiles": [low, high]}
            print(f"{name:<14}{1000 * median:>11.1f}   {middle:.3f} [{low:.3f}, {high:.3f}] {base}")
    memory = {}
    for position, options in {"nape": {}, "alibi": alibi}.items():
        for length in arguments.lengths:
            sizes = []
            for cutoff in (0.0, arguments.cutoff):
                cache = Cache(1, length, min(1024, length))
                with torch.no_grad():
                    model = model_of(**options, alibi_cutoff=cutoff)
                    model(torch.zeros(1, 1, dtype=torch.int64, device=device), cache=cache)
                sizes.append(sum(2 * kept.keys.numel() * kept.keys.element_size() for kept in cache.layers.values()))
            memory[f"{position} {length}"] = sizes
            whole, cut = (size / 2**20 for size in sizes)
            print(f"cache of a layer, {position}, {length} tokens: {whole:.1f} MiB, cut {cut:.1f}: {cut / whole:.3f}")
    errors = {}
    if arguments.checkpoint is not None:
        for length in arguments.lengths:
            errors[length] = cut_error(arguments.checkpoint, arguments.data, length, arguments.cutoffs)
            for cutoff, (error, largest) in errors[length].items():
                print(f"{length} tokens, cut at {cutoff:g} nats: logits of up to {largest:.1f} differ by {error:.1e}")
    return {"rows": rows, "seconds": seconds, "cache_bytes": memory, "errors": errors}


@torch.no_grad()
def cut_error(checkpoint: Path, data: Path, length: int, cutoffs: list[float]) -> dict[float, tuple[float, float]]:
    """The largest difference of a logit of the first `length` tokens of a packed set to those without a cut, and the
    largest logit, by cutoff; in fp64, read in pieces with a cache."""
    tokens = PackedDataset(data, length, seed=0, shuffle=False)[0]["input"][None]
    models = {}
    for cutoff in [0.0, *cutoffs]:
        args = model_args_of(resolve_checkpoint(checkpoint))
        args.alibi_cutoff = cutoff
        models[cutoff] = load_model(checkpoint, args).double()
    piece = piece_length(models[0.0].args, 1, length)
    caches = {cutoff: Cache(1, length, piece) for cutoff in models}
    found = dict.fromkeys(cutoffs, 0.0)
    largest = 0.0
    for start in tqdm(range(0, length, piece), desc=f"{length} tokens", unit="piece"):
        of = tokens[:, start : start + piece]
        logits = {cutoff: model(of, cache=caches[cutoff]) for cutoff, model in models.items()}
        largest = max(largest, logits[0.0].abs().max().item())
        for cutoff in cutoffs:
            found[cutoff] = max(found[cutoff], (logits[cutoff] - logits[0.0]).abs().max().item())
    return {cutoff: (error, largest) for cutoff, error in found.items()}


def layer_dropout(arguments: argparse.Namespace) -> dict:
    """A stack of blocks: dense, masked and skipped, by rate and sampling; several ranks run under FSDP2."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    device = device or torch.device("cpu")
    d, L, S, B = arguments.dim, arguments.layers, arguments.seq_len, arguments.batch_size
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def stack(**overrides) -> torch.nn.Module:
        model = stack_of_blocks(d, L, arguments.position, **overrides).to(device, dtype)
        if arguments.compile:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, torch.compile(block, fullgraph=True))
        if world_size > 1:
            for block in model.layers.values():
                fully_shard(block)
                if device.type == "cpu":
                    block.set_force_sum_reduction_for_comms(True)
        return model

    if world_size > 1:
        torch.distributed.init_process_group()
    skipping, masking = stack(), stack(skip_compute=False)
    x = torch.randn(B, S, d, device=device, dtype=dtype, requires_grad=True)
    kept_rows: dict[str, list[float]] = {}

    def step(name: str, model: torch.nn.Module, rate: float | None, sampling: str) -> Step:
        kept_rows[name] = []
        rounds = itertools.count()

        def run() -> None:
            keep = None
            if rate is not None:
                rates = torch.full((L,), rate, dtype=torch.float64)
                keep = keep_mask(rates, B * world_size, seed=0, step=next(rounds), sampling=sampling, group=B)
                keep = keep[rank * B : (rank + 1) * B]
                kept_rows[name].append(keep.double().mean().item())
            h = x
            kept = model.kept(x, keep, None if rate is None else [1 / (1 - rate)] * L)
            for own, block in zip(kept, model.layers.values(), strict=True):
                h = block(h, block.context(S, device, None), own)
            h.sum().backward()
            for parameter in model.parameters():
                parameter.grad = None
            if world_size > 1:
                torch.distributed.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return run

    steps = {"dense": step("dense", skipping, None, "")}
    for rate in arguments.rates:
        if rate == 0.5:
            steps["masked 0.5"] = step("masked 0.5", masking, rate, "bernoulli")
        for sampling in ("bernoulli", "balanced") if rate else ("bernoulli",):
            name = f"skipped {rate} {sampling}"
            steps[name] = step(name, skipping, rate, sampling)
    seconds = time_rounds(steps, arguments.rounds, arguments.warmup)
    rows = {}
    if rank == 0:
        print(f"{'variant':<24}{'ms a step':>11}   ratio [quartiles] to dense   computed   time / compute saved")
    for name in steps:
        middle, low, high = ratio(seconds, name, "dense")
        kept = statistics.fmean(kept_rows[name][arguments.warmup :]) if kept_rows[name] else 1.0
        rows[name] = {
            "seconds": statistics.median(seconds[name]),
            "ratio": middle,
            "quartiles": [low, high],
            "kept": kept,
        }
        saved = f"{(1 - middle) / (1 - kept):.2f}" if kept < 1 else ""
        if rank == 0:
            milliseconds = 1000 * rows[name]["seconds"]
            print(f"{name:<24}{milliseconds:>11.1f}   {middle:.3f} [{low:.3f}, {high:.3f}]{kept:>18.3f}{saved:>23}")
    if world_size > 1:
        torch.distributed.destroy_process_group()
    sizes = {"dim": d, "layers": L, "seq_len": S, "batch_size": B, "position": arguments.position}
    return {"rows": rows, "seconds": seconds, "ranks": world_size, "sizes": sizes}


def layer_time(d: int, S: int, B: int, position: str, rounds: int, warmup: int) -> LayerTime:
    """Of one block, forward and backward, by how many of B sequences it keeps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = stack_of_blocks(d, 1, position).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    (block,) = model.layers.values()
    x = torch.randn(B, S, d, device=device, dtype=next(model.parameters()).dtype, requires_grad=True)
    context = block.context(S, device, None)

    def step(n: int) -> Step:
        keep = torch.arange(B)[:, None] < n
        ((own,),) = model.kept(x, keep, None)

        def run() -> None:
            block(x, context, (own,)).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return run

    counts = sorted({1, *(max(1, B * quarters // 4) for quarters in (1, 2, 3, 4))})
    seconds = time_rounds({str(n): step(n) for n in counts}, rounds, warmup)
    return LayerTime.fit(counts, [statistics.median(seconds[str(n)]) for n in counts])


def stragglers(arguments: argparse.Namespace) -> dict:
    """What layer dropout saves in time where ranks wait for each other at every layer, simulated from the time of a
    layer here, for 8 to 1024 ranks; with --against, beside a measured run of several ranks."""
    rows: list[dict] = []
    check: dict | None = None
    L, S, d, meeting = arguments.layers, arguments.seq_len, arguments.dim, arguments.meeting
    if arguments.against is not None:
        check = compare_with_run(arguments)
    time = layer_time(d, S, max(arguments.batches), "nape", arguments.rounds, arguments.warmup)
    time = dataclasses.replace(time, meeting=meeting * (time.fixed + time.sequence * max(arguments.batches)))
    print(f"a layer: {1000 * time.fixed:.2f} ms + {1000 * time.sequence:.2f} ms a sequence; meeting "
          f"{1000 * time.meeting:.2f} ms")  # fmt: skip
    for name, p_max in itertools.product(("uniform", "increasing"), arguments.rates):
        rates = layer_rates(name, "constant", p_max, L, 0, 1)
        for ranks, batch, sampling in itertools.product(arguments.ranks, arguments.batches, ("bernoulli", "balanced")):
            found = simulate(rates, ranks, batch, sampling, time, arguments.steps)
            rows.append({"distribution": name, "p_max": p_max, "ranks": ranks, "batch": batch, "sampling": sampling,
                         **dataclasses.asdict(found)})  # fmt: skip
    plot = arguments.output.with_suffix(".png")
    plot.parent.mkdir(parents=True, exist_ok=True)
    plot_stragglers(rows, plot)
    print(f"wrote {plot}")
    return {"rows": rows, "layer_time": dataclasses.asdict(time), "against": check}


def compare_with_run(arguments: argparse.Namespace) -> dict:
    """A layer-dropout benchmark of several ranks on this machine, and what the simulation makes of it: the time of a
    layer is measured here in one process, the meeting is what the run's dense step took beside it."""
    run = json.loads(arguments.against.read_text())
    sizes, ranks = run["sizes"], run["ranks"]
    d, L, S, B = (sizes[name] for name in ("dim", "layers", "seq_len", "batch_size"))
    time = layer_time(d, S, B, sizes["position"], arguments.rounds, arguments.warmup)
    devices = None if torch.cuda.is_available() else min(ranks, os.cpu_count() or ranks)
    alone = step_seconds(np.full((ranks, L), B), time, devices)
    meeting = max(0.0, run["rows"]["dense"]["seconds"] - alone) / L
    time = dataclasses.replace(time, meeting=meeting)
    found = {}
    print(f"{ranks} ranks, {sizes}: time to dense   measured  simulated  error")
    for name, row in run["rows"].items():
        words = name.split()
        if words[0] != "skipped" or float(words[1]) == 0:
            continue
        rates = torch.full((L,), float(words[1]), dtype=torch.float64)
        share = simulate(rates, ranks, B, words[2], time, arguments.steps, devices).time
        found[name] = {"measured": row["ratio"], "simulated": share, "error": share / row["ratio"] - 1}
        print(f"{name:<32}{row['ratio']:>12.3f}{share:>11.3f}{found[name]['error']:>+8.1%}")
    return {"file": str(arguments.against), "layer_time": dataclasses.asdict(time), "devices": devices, "rows": found}


def plot_stragglers(rows: list[dict], file: Path) -> None:
    """The share of the saved compute that is saved in time, by ranks, a line for each local batch."""
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((row["distribution"], row["p_max"]) for row in rows))
    figure = Figure(figsize=(3.4 * len(kinds), 3.6), layout="constrained")
    for axes, (name, p_max) in zip(figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        own = [row for row in rows if (row["distribution"], row["p_max"]) == (name, p_max)]
        batches = sorted({row["batch"] for row in own})
        for number, batch in enumerate(batches):
            for sampling, style in (("bernoulli", "o-"), ("balanced", "s--")):
                line = [row for row in own if row["batch"] == batch and row["sampling"] == sampling]
                axes.plot(
                    [row["ranks"] for row in line], [row["time_saved_of_compute_saved"] for row in line], style,
                    markersize=3, linewidth=1, color=f"C{number}",
                    label=f"local batch {batch}, {sampling}",
                )  # fmt: skip
        computed = statistics.fmean(row["computed"] for row in own)
        axes.set(
            title=f"{name}, p_max {p_max:g}\n{1 - computed:.0%} of the compute saved", xscale="log", ylim=(-0.05, 1.1)
        )
        axes.set_xlabel("ranks")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("time saved / compute saved")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=7)
    figure.savefig(file, dpi=150)


@dataclasses.dataclass(frozen=True)
class Bound:
    """What a figure of a benchmark may be at most, on 2 cores."""

    verb: str
    options: tuple[str, ...]
    row: str
    most: float
    figure: str = "ratio"


BOUNDS = (
    Bound("dense", (), "rope", 1.02),  # TorchTitan's llama3 at equal size
    Bound("dense", (), "nape vpad", 1.08),  # NAPE without dropout
    Bound("dense", ("--compile",), "rope", 1.02),
    Bound("dense", ("--compile",), "nape vpad", 1.04),
    Bound("layer-dropout", (), "skipped 0.5 balanced", 0.55),  # the dense stack
    Bound("mamba2", (), "ours, chunk 256", 1.0),  # transformers
    Bound("generation", ("--batch-size", "1"), "ours / transformers", 1.0),
    Bound("generation", ("--batch-size", "1", "--family", "mamba2"), "ours / transformers", 1.0),
    Bound("attention", (), "nape, cut / nape, whole", 0.6),
    Bound("attention", (), "nape, cut / causal", 1.0),
    Bound("loss", (), "4 pieces", 0.25, "peak_ratio"),
)


def run_all(arguments: argparse.Namespace) -> dict:
    """All that have a bound, one after another; status 1 where a figure is above its own. About 20 minutes, in which
    nothing else should run."""
    folder = arguments.output.parent / "benchmark_all"
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(dict.fromkeys((bound.verb, bound.options) for bound in BOUNDS))
    found: dict[tuple[str, tuple[str, ...]], dict] = {}
    for number, (verb, options) in enumerate(runs):
        if arguments.only and verb not in arguments.only:
            continue
        print(f"[{number + 1}/{len(runs)}] {verb} {' '.join(options)}", flush=True)
        file = folder / ("_".join([verb, *options]).replace("--", "") + ".json")
        command = [sys.executable, __file__, verb, *options, *arguments.options, "--output", str(file)]
        subprocess.run(command, check=True)
        found[verb, options] = json.loads(file.read_text())["rows"]
    rows = {}
    print(f"{'figure':<64}{'found':>8}{'at most':>9}")
    for bound in BOUNDS:
        if (bound.verb, bound.options) in found:
            value = found[bound.verb, bound.options][bound.row][bound.figure]
            name = " ".join([bound.verb, *bound.options, bound.row])
            rows[name] = {bound.figure: value, "at_most": bound.most, "held": value <= bound.most}
            print(f"{name:<64}{value:>8.3f}{bound.most:>9.2f}{'' if value <= bound.most else '   above its bound'}")
    return {"rows": rows}


def bare_tokenizer(path: Path | str, texts: list[str]) -> int:
    """The tokens of `texts`, by the tokenizer library's plain call, one text after another in one thread."""
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, TiktokenTokenizer):
        return sum(len(tokenizer.encoding.encode_ordinary(text)) for text in texts)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return sum(len(tokenizer.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    return sum(len(text.encode()) for text in texts)


def data(arguments: argparse.Namespace) -> dict:
    """Time preparation with one and two workers against the bare tokenizer, and the training loader."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts, size = [], 0
        for text in itertools.cycle(stdlib_sources()):
            texts.append(text)
            size += len(text)
            if size > arguments.megabytes * 1e6:
                break
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = arguments.tokenizer
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            train_tokenizer(stdlib_sources(), arguments.vocab_size).save(str(tokenizer))

        def prepared(workers: int) -> int:
            shutil.rmtree(folder / "set", ignore_errors=True)
            return prepare([str(folder / "text.jsonl")], tokenizer, folder / "set", workers=workers)["tokens"]

        prepared(1)  # starts the process that workers are forked from
        measures = {
            "bare tokenizer": lambda: bare_tokenizer(tokenizer, texts),
            "1 worker": lambda: prepared(1),
            "2 workers": lambda: prepared(2),
        }
        rates: dict[str, list[float]] = {name: [] for name in measures}
        for _ in range(arguments.rounds):
            for name, measure in measures.items():
                began = time.perf_counter()
                rates[name].append(measure() / (time.perf_counter() - began))
        rows = {}
        for name, base in (("1 worker", "bare tokenizer"), ("2 workers", "1 worker")):
            middle, low, high = ratio(rates, name, base)
            rows[f"{name} / {base}"] = {"ratio": middle, "quartiles": [low, high]}
            print(f"{name} / {base}: {middle:.3f} [{low:.3f}, {high:.3f}]")
        for name in rates:
            print(f"{name}: {statistics.median(rates[name]):,.0f} tokens/s")

        loader = iter(TrainingLoader(Mixture(str(folder / "set"), 2048, seed=0), 8, 0, 1))
        for _ in range(1000):
            next(loader)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        for _ in tqdm(range(arguments.samples // 8), desc="loader", unit="batch"):
            next(loader)
        rate = arguments.samples // 8 * 8 * 2048 / (time.perf_counter() - began)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"loader, 8 sequences of 2048: {rate:,.0f} tokens/s; {grown:.1f} MiB more after {arguments.samples:,}")
    loaded = {"tokens_per_second": rate, "grown_mib": grown, "samples": arguments.samples}
    return {"rows": rows, "tokens_per_second": rates, "loader": loaded}


def loss_step(arguments: argparse.Namespace, pieces: int, tokens: int) -> Step:
    """Forward and backward of head and loss; 1 piece: whole, by TorchTitan's loss. fp32, on CUDA bf16."""
    from torchtitan.components.loss import cross_entropy_loss

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head = Head(arguments.dim, arguments.vocab_size).to(device, dtype)
    h = torch.randn(1, tokens, arguments.dim, device=device, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, arguments.vocab_size, (1, tokens), device=device)

    def step() -> None:
        loss = cross_entropy_loss(head(h), labels) if pieces == 1 else head(h, labels=labels, pieces=pieces)
        (loss / tokens).backward()
        h.grad = head.weight.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def resident_bytes(name: str) -> int:
    """Of this process, now (VmRSS) or at most (VmHWM; rusage's is the parent's where that had more)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def loss_peak(arguments: argparse.Namespace, pieces: int, result) -> None:
    """Into `result` the bytes that a step adds at most to what is held before it: on the CPU the process's own peak,
    so once a process."""
    loss_step(arguments, pieces, 16)()  # the libraries' own buffers
    step = loss_step(arguments, pieces, arguments.batch_size * arguments.seq_len)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        result.value = torch.cuda.max_memory_allocated() - before
    else:
        before = resident_bytes("VmRSS")
        step()
        result.value = resident_bytes("VmHWM") - before


def loss(arguments: argparse.Namespace) -> dict:
    """Head and loss whole and in pieces: time, and peak memory, each in a process of its own."""
    tokens = arguments.batch_size * arguments.seq_len
    by_size = max(1, -(-tokens * arguments.vocab_size // PIECE_OF_LOGITS))
    pieces = {} if arguments.skip_whole else {"whole": 1}
    pieces |= {f"{n or by_size} pieces": n or by_size for n in arguments.pieces}
    spawn = multiprocessing.get_context("spawn")
    rows: dict[str, dict] = {}
    for name, n in pieces.items():
        result = spawn.Value("q", 0)
        process = spawn.Process(target=loss_peak, args=(arguments, n, result))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{name}: its process ended with {process.exitcode}; too little memory? See --skip-whole")
        rows[name] = {"peak_mib": result.value / 2**20}
        rows[name]["peak_ratio"] = rows[name]["peak_mib"] / next(iter(rows.values()))["peak_mib"]
        print(f"{name}: at most {rows[name]['peak_mib']:,.0f} MiB", flush=True)
    seconds = time_rounds(
        {name: loss_step(arguments, n, tokens) for name, n in pieces.items()}, arguments.rounds, arguments.warmup
    )
    base = next(iter(pieces))
    print(f"{'variant':<12}{'peak MiB':>10}{base + ' / it':>16}{'seconds':>9}   time to {base}'s [quartiles]")
    for name, row in rows.items():
        middle, low, high = ratio(seconds, name, base)
        row |= {"seconds": statistics.median(seconds[name]), "ratio": middle, "quartiles": [low, high]}
        figures = f"{row['peak_mib']:>10,.0f}{1 / row['peak_ratio']:>16.2f}{row['seconds']:>9.2f}"
        print(f"{name:<12}{figures}   {middle:.3f} [{low:.3f}, {high:.3f}]")
    return {"rows": rows, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sizes = {
        "dense": {
            "dim": 768,
            "layers": 4,
            "seq-len": 512,
            "batch-size": 4,
            "vocab-size": 2048,
            "rounds": 15,
            "warmup": 3,
        },
        "layer-dropout": {"dim": 512, "layers": 6, "seq-len": 512, "batch-size": 8, "rounds": 11, "warmup": 2},
        "mamba2": {"dim": 768, "layers": 1, "seq-len": 1024, "batch-size": 2, "rounds": 7, "warmup": 1},
        "generation": {"dim": 256, "layers": 4, "seq-len": 1024, "batch-size": 4, "rounds": 7, "warmup": 1},
        "attention": {"dim": 768, "seq-len": 2048, "batch-size": 2, "rounds": 11, "warmup": 1},
        "loss": {"dim": 768, "seq-len": 512, "batch-size": 8, "vocab-size": 128256, "rounds": 3, "warmup": 1},
    }
    verbs = {
        "dense": dense,
        "layer-dropout": layer_dropout,
        "mamba2": mamba2,
        "generation": generation,
        "attention": attention,
        "loss": loss,
    }
    for name, run in verbs.items():
        command = commands.add_parser(name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for option, default in sizes[name].items():
            command.add_argument(f"--{option}", type=int, default=default, help=" ")
        if name == "generation":
            command.add_argument("--new-tokens", type=int, default=64, help="of each answer")
            command.add_argument("--family", choices=FAMILIES, default="nape_llama3", help=" ")
        elif name == "loss":
            command.add_argument("--pieces", type=int, nargs="+", default=[0], help="as training.loss_chunks")
            command.add_argument("--skip-whole", action="store_true", help="where whole logits do not fit")
        else:
            command.add_argument("--compile", action="store_true", help="compile each block")
        command.add_argument("--output", type=Path, default=Path(f"outputs/benchmark_{name}.json"), help="result file")
        command.set_defaults(run=run)
        if name == "dense":
            command.add_argument("--p", type=float, default=0.1, help="drop probability")
        elif name == "attention":
            command.add_argument("--cutoff", type=float, default=40.0, help="nats, of time and memory")
            command.add_argument("--lengths", type=int, nargs="+", default=[2048, 65536], help="of memory and error")
            command.add_argument("--checkpoint", type=Path, help="a trained model, for the error")
            command.add_argument(
                "--data", type=Path, default=Path("data/stdlib/long"), help="packed set, for the error"
            )
            command.add_argument("--cutoffs", type=float, nargs="+", default=[40.0], help="nats, of the error")
        elif name == "mamba2":
            command.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128, 256], help="tokens a chunk")
        elif name == "layer-dropout":
            command.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75], help="drop rates")
            command.add_argument("--position", choices=("nape", "rope"), default="nape", help="positions")
    command = commands.add_parser(
        "stragglers", help=stragglers.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for option, value in {"dim": 512, "layers": 24, "seq-len": 512, "rounds": 7, "warmup": 2, "steps": 20}.items():
        command.add_argument(f"--{option}", type=int, default=value, help=" ")
    command.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024], help=" ")
    command.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="sequences of a rank")
    command.add_argument("--rates", type=float, nargs="+", default=[0.4, 0.8], help="p_max")
    command.add_argument(
        "--meeting", type=float, default=0.0,
        help="time of a layer's gathers that nothing hides, in dense layers of the largest batch",
    )  # fmt: skip
    command.add_argument("--against", type=Path, help="result of layer-dropout under torchrun on this machine")
    command.add_argument("--output", type=Path, default=Path("outputs/benchmark_stragglers.json"), help="result file")
    command.set_defaults(run=stragglers)
    command = commands.add_parser("data", help=data.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.add_argument("--tokenizer", help="folder or file; without it one is trained on the text")
    command.add_argument("--vocab-size", type=int, default=32000, help="of the trained tokenizer")
    command.add_argument("--megabytes", type=float, default=40, help="of text, the standard library over and over")
    command.add_argument("--samples", type=int, default=1_000_000, help="that the loader reads")
    command.add_argument("--rounds", type=int, default=5, help=" ")
    command.add_argument("--output", type=Path, default=Path("outputs/benchmark_data.json"), help="result file")
    command.set_defaults(run=data)
    command = commands.add_parser("all", help=run_all.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    verbs_of_all = sorted({bound.verb for bound in BOUNDS})
    command.add_argument("--only", nargs="+", choices=verbs_of_all, default=[], metavar="VERB", help="of them")
    command.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="the rest: options of every verb")
    command.add_argument("--output", type=Path, default=Path("outputs/benchmark_all.json"), help="result file")
    command.set_defaults(run=run_all, rounds=2)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    if getattr(arguments, "dim", 128) % 128:
        parser.error("--dim: must be a multiple of 128 (an even number of heads of 64)")
    if not all(0 <= rate < 1 for rate in getattr(arguments, "rates", [])):
        parser.error("--rates: must be in [0, 1)")
    result = arguments.run(arguments)
    if os.environ.get("RANK", "0") != "0":
        return 0
    result |= {
        "command": " ".join(["python", *sys.argv]),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.output}")
    held = arguments.run is not run_all or all(row["held"] for row in result["rows"].values())
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(interruptible(main))
