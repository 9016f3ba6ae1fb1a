"""Paired step timings, as ratios.

    python scripts/benchmark.py dense [--compile]
    python scripts/benchmark.py layer-dropout [--compile]
    torchrun --nproc_per_node=2 scripts/benchmark.py layer-dropout
    python scripts/benchmark.py mamba2 [--compile]
    python scripts/benchmark.py generation
    python scripts/benchmark.py attention [--checkpoint DIR --data SET --lengths 2048 65536]
    python scripts/benchmark.py data [--tokenizer DIR]

Variants take turns, one step each a round, so that a drift of the machine's speed meets all of them alike; a ratio is
the median over rounds of the pairwise ratios. A dense step is forward, loss, backward and a fused AdamW update; a
layer-dropout or mamba2 step is forward and backward of a stack of blocks; a generation step reads prompts and writes
greedy answers with a cache; an attention step is forward and backward of one attention layer. The data benchmark sets
preparation beside the bare tokenizer, and reads a packed set as training does.
"""

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from tqdm import tqdm

from regdrop_titan.checkpoints import load_model
from regdrop_titan.checkpoints.huggingface import export_huggingface
from regdrop_titan.checkpoints.loading import model_args_of, resolve_checkpoint
from regdrop_titan.data import PackedDataset
from regdrop_titan.data.loader import TrainingLoader
from regdrop_titan.data.mixture import Mixture
from regdrop_titan.data.preparation import prepare
from regdrop_titan.data.stdlib_corpus import stdlib_sources
from regdrop_titan.data.tokenizers import HuggingFaceTokenizer, TiktokenTokenizer, load_tokenizer, train_tokenizer
from regdrop_titan.generation import generate
from regdrop_titan.models import FAMILIES, build_model
from regdrop_titan.models.cache import Cache, piece_length
from regdrop_titan.regularization import keep_mask
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
        model = build_model(
            "nape_llama3", "debug", dim=d, n_layers=L, n_heads=d // 64, n_kv_heads=d // 64, ffn_dim=4 * d,
            vocab_size=64, position=arguments.position, **overrides,
        )  # fmt: skip
        model = model.to(device, dtype)
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
    return {"rows": rows, "seconds": seconds, "ranks": world_size}


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
    }
    verbs = {
        "dense": dense,
        "layer-dropout": layer_dropout,
        "mamba2": mamba2,
        "generation": generation,
        "attention": attention,
    }
    for name, run in verbs.items():
        command = commands.add_parser(name, help=run.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for option, default in sizes[name].items():
            command.add_argument(f"--{option}", type=int, default=default, help=" ")
        if name == "generation":
            command.add_argument("--new-tokens", type=int, default=64, help="of each answer")
            command.add_argument("--family", choices=FAMILIES, default="nape_llama3", help=" ")
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
    command = commands.add_parser("data", help=data.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    command.add_argument("--tokenizer", help="folder or file; without it one is trained on the text")
    command.add_argument("--vocab-size", type=int, default=32000, help="of the trained tokenizer")
    command.add_argument("--megabytes", type=float, default=40, help="of text, the standard library over and over")
    command.add_argument("--samples", type=int, default=1_000_000, help="that the loader reads")
    command.add_argument("--rounds", type=int, default=5, help=" ")
    command.add_argument("--output", type=Path, default=Path("outputs/benchmark_data.json"), help="result file")
    command.set_defaults(run=data)
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
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main))
