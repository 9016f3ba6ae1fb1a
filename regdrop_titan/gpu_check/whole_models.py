"""Checks of whole models of debug size against the same models on the CPU in fp64."""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ..generation import generate
from ..models import Decoder, build_model
from ..models.cache import Cache
from ..regularization import keep_mask
from .kernels import has_fla
from .rows import FAILED, NEEDS_CUDA, NEEDS_FLA, Machine, Row, agreed, bounded, compared

# Every way that attention takes on a GPU (models/attention.py) is among them
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # FlexAttention
    "NAPE": ("nape_llama3", {}),
    "NAPE, no cut": ("nape_llama3", {"alibi_cutoff": 0.0}),
    "NAPE, window": ("nape_llama3", {"sliding_window": 50}),
    "NAPE, documents": ("nape_llama3", {"document_mask": True}),
    "ALiBi, grouped queries": ("nape_llama3", {"position": "alibi", "slopes": "press", "n_kv_heads": 2}),
    "RoPE, window, documents": (
        "nape_llama3", {"position": "rope", "sliding_window": 50, "document_mask": True},
    ),
    "NAPE, adaptive scaling": ("nape_llama3", {"scaling": "adaptive"}),
    "NAPE, ssmax": ("nape_llama3", {"scaling": "ssmax", "scaled_heads": "all"}),
    "SmolLM3, window": ("smollm3", {"sliding_window": 50}),
    "Celerity": ("celerity", {"parametrization": "completep", "base_dim": 32, "base_layers": 2}),
    # SDPA, plain causal
    "RoPE": ("nape_llama3", {"position": "rope"}),
    "RoPE, YaRN": (
        "nape_llama3", {"position": "rope", "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 100},
    ),
    "NoPE": ("nape_llama3", {"position": "nope"}),
    "SmolLM3": ("smollm3", {}),
    # SDPA by groups of heads, bands among them, and with a bias: what FlexAttention lacks is dropout
    "NAPE, attention dropout": ("nape_llama3", {"attention_p": 0.1}),
    "NAPE, attention dropout, documents": ("nape_llama3", {"attention_p": 0.1, "document_mask": True}),
    "RoPE, attention dropout, window": (
        "nape_llama3", {"position": "rope", "attention_p": 0.1, "sliding_window": 50},
    ),
    "entmax15": ("nape_llama3", {"attention": "entmax15"}),
    "entmax15, window, documents": (
        "nape_llama3", {"attention": "entmax15", "sliding_window": 50, "document_mask": True},
    ),
    "Mamba2": ("mamba2", {"chunk_size": 64}),
    "Mamba2, documents": ("mamba2", {"chunk_size": 64, "document_mask": True}),
    "Mamba2 and attention": ("mamba2", {"chunk_size": 64, "layers": "mamba,attention"}),
}  # fmt: skip
SMALL_VARIANTS = ("NAPE", "NAPE, attention dropout, documents", "SmolLM3, window", "Celerity", "entmax15", "Mamba2")
FAMILIES = ("NAPE", "SmolLM3", "Celerity", "Mamba2")

# Relative errors at most, of models without and with the scan, whose decays' gradients are differences of large numbers
# and whose kernels multiply in TF32
BOUNDS = {torch.float32: (5e-3, 3e-2), torch.bfloat16: (6e-2, 2e-1)}
LOUDER = 3.0  # at their initial size layers add so little that a wrong one would hardly show in the logits
SHARE = 1e-2  # gradients of a norm below this share of the largest one count as that large


def variants(machine: Machine, names: Sequence[str]) -> tuple[list[str], list[Row]]:
    """Those of `names` that can run, and rows that say why others cannot."""
    lacking = [name for name in names if machine.cuda and name.startswith("Mamba2") and not has_fla()]
    return [name for name in names if name not in lacking], [Row(name, NEEDS_FLA) for name in lacking]


def bound_of(variant: str, dtype: torch.dtype = torch.float32) -> float:
    return BOUNDS[dtype][variant.startswith("Mamba2")]


def models_of(machine: Machine, variant: str, **overrides: Any) -> tuple[Decoder, Decoder]:
    """One on the device in fp32, one on the CPU in fp64, equal weights. Small ones in a rehearsal."""
    family, options = VARIANTS[variant]
    sizes: dict[str, Any] = {"vocab_size": 256} | (
        {"n_layers": 4 if family == "smollm3" else 2} if machine.small else {}
    )
    model = build_model(family, "debug", **{**sizes, **options, **overrides})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any():  # from zero, at which its gradient may be zero too
                parameter.normal_(0, 0.02, generator=generator)
            elif name.startswith("layers.") and parameter.dim() == 2:
                parameter.mul_(LOUDER)
    return copy.deepcopy(model).to(machine.device), model.double()


def made_tokens(machine: Machine, B: int = 2, S: int | None = None) -> Tensor:
    """(B, S) on the CPU. 450 tokens are enough for bands of local heads, and no multiple of a block; token 0 ends a
    document."""
    S = S or (70 if machine.small else 450)
    tokens = torch.randint(1, 256, (B, S), generator=torch.Generator().manual_seed(7))
    tokens[:, 17::41] = 0
    return tokens


def results(model: Decoder, tokens: Tensor, **kwargs: Any) -> list[Tensor]:
    """Logits, and the gradients of the loss (summed over the tokens, in pieces) by every parameter."""
    tokens = tokens.to(next(model.parameters()).device)
    labels = tokens.roll(-1, dims=1)
    with torch.no_grad():
        logits = model(tokens, **kwargs)
    loss = model(tokens, labels=labels, loss_pieces=2, **kwargs)
    return [logits, loss, *torch.autograd.grad(loss, list(model.parameters()))]


def comparison(name: str, got: list[Tensor], expected: list[Tensor], bound: float) -> list[Row]:
    return [
        compared(f"{name}: logits and loss", got[:2], expected[:2], bound),
        compared(f"{name}: gradients", got[2:], expected[2:], bound, SHARE),
    ]


def compile_each_block(model: Decoder, machine: Machine) -> Decoder:
    """As training does it."""
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=machine.backend)
    return model


def models_against_cpu(machine: Machine) -> list[Row]:
    """Each family and attention variant, eager, in fp32, in evaluation (attention dropout is off)."""
    names, rows = variants(machine, SMALL_VARIANTS if machine.small else list(VARIANTS))
    tokens = made_tokens(machine)
    for name in names:
        torch._dynamo.reset()
        with _named(name, rows):
            model, exact = models_of(machine, name)
            rows += comparison(name, results(model.eval(), tokens), results(exact.eval(), tokens), bound_of(name))
    return rows


def compiled_models(machine: Machine) -> list[Row]:
    """Families with compiled blocks, in fp32 and under bf16 autocast, as training runs them."""
    names, rows = variants(machine, ("NAPE",) if machine.small else FAMILIES)
    tokens = made_tokens(machine)
    for name in names:
        torch._dynamo.reset()
        with _named(name, rows):
            model, exact = models_of(machine, name)
            expected = results(exact, tokens)
            compile_each_block(model, machine)
            rows += comparison(f"{name}, compiled", results(model, tokens), expected, bound_of(name))
            with torch.autocast(machine.device.type, dtype=torch.bfloat16):
                rows += comparison(
                    f"{name}, compiled, bf16", results(model, tokens), expected, bound_of(name, torch.bfloat16)
                )
    return rows


@contextlib.contextmanager
def _named(name: str, rows: list[Row]) -> Iterator[None]:
    """An exception inside is a row of `name`, and others go on; one that the device does not survive ends the part."""
    try:
        yield
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                raise RuntimeError(f"{name}: {told}") from error
        rows.append(Row(name, FAILED, message=told))


# Layer dropout ------------------------------------------------------------------------------------------------------


def made_masks(model: Decoder, B: int) -> tuple[Tensor, list[float]]:
    """Half of all, and layers that keep all, nothing and one sequence where there are so many."""
    L = model.args.n_layers
    shape = (L, 2) if model.args.unit == "sublayer" else (L,)
    keep = keep_mask(torch.full(shape, 0.5, dtype=torch.float64), B, seed=1, step=3)
    keep[:, -1] = False
    if L > 2:
        keep[:, 1], keep[:, 2] = True, False
        keep[B - 1, 2] = True
    return keep, [2.0] * L


def layer_dropout(machine: Machine) -> list[Row]:
    """Skipping, eager and compiled, against computing all and masking, on the CPU in fp64."""
    cases: list[tuple[str, dict[str, Any]]] = [("NAPE", {}), ("NAPE, documents", {}), ("NAPE", {"unit": "sublayer"})]
    cases += [] if machine.small else [("RoPE", {}), ("Mamba2", {})]
    _, rows = variants(machine, [name for name, _ in cases])
    B = 6
    tokens = made_tokens(machine, B, 70 if machine.small else 300)
    for number, (variant, options) in enumerate(cases):
        if variant in {row.name for row in rows}:
            continue
        # a CPU takes a minute to compile one
        for mode in ("eager",) if machine.small and number else ("eager", "compiled"):
            name = f"layer dropout, {', '.join([variant, *options.values(), mode])}"
            torch._dynamo.reset()
            with _named(name, rows):
                model, _ = models_of(machine, variant, **options)
                _, masked = models_of(machine, variant, skip_compute=False, **options)
                keep, scale = made_masks(model, B)
                expected = results(masked, tokens, keep=keep, scale=scale)
                if mode == "compiled":
                    compile_each_block(model, machine)
                rows += comparison(name, results(model, tokens, keep=keep, scale=scale), expected, bound_of(variant))
    return rows


def waits(work) -> str | None:
    """What CUDA says of the first time that `work` waits for the device; None where it never does."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def no_synchronisation(machine: Machine) -> list[Row]:
    """Forward and backward with dropped sequences never wait for the device, eager or compiled."""
    names = ["eager", "compiled"]
    if not machine.cuda:
        return [Row(f"layer dropout waits for nothing, {mode}", NEEDS_CUDA) for mode in names]
    rows = [
        agreed(
            "a wait is noticed", waits(lambda: torch.ones(1, device=machine.device).item()) is not None,
            "torch's debug mode did not notice .item()",
        )
    ]  # fmt: skip
    for mode in names:
        torch._dynamo.reset()
        model, _ = models_of(machine, "NAPE", placement="vpad", p=0.1)
        tokens = made_tokens(machine, 6, 128).to(machine.device)
        keep, scale = made_masks(model, 6)
        if mode == "compiled":
            compile_each_block(model, machine)

        def step(model=model, tokens=tokens, keep=keep, scale=scale) -> None:
            model(tokens, keep=keep, scale=scale).float().square().mean().backward()

        for _ in range(3):  # what is made once: graphs, masks, pinned memory
            step()
        found = waits(step)
        rows.append(agreed(f"layer dropout waits for nothing, {mode}", found is None, found or ""))
    return rows


# Recomputation ------------------------------------------------------------------------------------------------------


def recomputation(machine: Machine) -> list[Row]:
    """With recomputation the gradient of a loss under dropout is its slope: a second mask would not belong to the
    first one's loss. In fp64, along a random direction, by central differences."""
    rows = []
    tokens = made_tokens(machine, 2, 32).to(machine.device)
    for placement in ("vpad", "pre_norm"):
        for mode in ("eager", "compiled"):
            torch._dynamo.reset()
            _, model = models_of(machine, "RoPE", placement=placement, p=0.3, n_layers=2)
            model = model.to(machine.device)
            for number, block in model.layers.items():
                model.layers[number] = checkpoint_wrapper(block, preserve_rng_state=True)
            if mode == "compiled":
                compile_each_block(model, machine)
            parameters = list(model.parameters())

            def loss(model=model) -> Tensor:
                torch.manual_seed(5)
                return model(tokens, labels=tokens.roll(-1, dims=1)) / tokens.numel()

            gradients = torch.autograd.grad(loss(), parameters)
            directions = [torch.randn_like(p) for p in parameters]
            slope = torch.stack([(g * v).sum() for g, v in zip(gradients, directions, strict=True)]).sum()
            ends = []
            for step in (1e-5, -1e-5):
                moved(parameters, directions, step)
                ends.append(loss().detach())  # with a graph, as before: without one, another would be compiled
                moved(parameters, directions, -step)
            difference = (ends[0] - ends[1]) / 2e-5
            rows.append(compared(f"recomputation, {placement}, {mode}", [slope], [difference], 1e-4))
    return rows


@torch.no_grad()
def moved(parameters: Sequence[Tensor], directions: Sequence[Tensor], step: float) -> None:
    for parameter, direction in zip(parameters, directions, strict=True):
        parameter.add_(direction, alpha=step)


# Reading and writing ------------------------------------------------------------------------------------------------


@torch.no_grad()
def cache_in_pieces(machine: Machine) -> list[Row]:
    """What is read in pieces with a cache, against one forward on the CPU in fp64."""
    S, piece = (70, 32) if machine.small else (700, 256)
    names, rows = variants(machine, (*FAMILIES, "NAPE, documents"))
    tokens = made_tokens(machine, 2, S)
    for name in names:
        with _named(f"cache, {name}", rows):
            model, exact = models_of(machine, name)
            cache = Cache(2, S, piece)
            own = tokens.to(machine.device)
            got = [model.eval()(own[:, i : i + piece], cache=cache) for i in range(0, S, piece)]
            rows.append(compared(f"cache, {name}", [torch.cat(got, dim=1)], [exact.eval()(tokens)], bound_of(name)))
    return rows


def ways_to_write(machine: Machine, draft: Sequence[int]) -> list[tuple[str, Sequence[int] | None, bool]]:
    """Their names, the draft, and whether blocks are compiled. A rehearsal compiles without a draft only, since a CPU
    takes a minute a way."""
    ways = [
        (f"{'draft' if layers else 'plain'}, {'compiled' if compiled else 'eager'}", layers, compiled)
        for layers in (None, draft)
        for compiled in (False, True)
    ]
    return ways[:-1] if machine.small else ways


@torch.no_grad()
def greedy_generation(machine: Machine) -> list[Row]:
    """Greedy answers, eager and compiled, plain and with a draft: no other token would have been better, by one forward
    of prompt and answer on the CPU in fp64. In standard deviations of the logits."""
    names, rows = variants(machine, ("NAPE",) if machine.small else ("NAPE", "Mamba2"))
    lengths, new = ((9, 20), 6) if machine.small else ((100, 333), 24)
    for name in names:
        torch._dynamo.reset()
        model, exact = models_of(machine, name)
        prompts = [made_tokens(machine, 1, n)[0] for n in lengths]
        for way, draft, compiled in ways_to_write(machine, [0]):
            label = f"greedy, {name}, {way}"
            with _named(label, rows):
                answers, _ = generate(model.eval(), prompts, new, draft_layers=draft, draft_length=3, compile=compiled)
                worst = max(map(lost, [exact.eval()] * len(prompts), prompts, answers))
                rows.append(bounded(label, worst, 5e-2))
    return rows


def lost(model: Decoder, prompt: Tensor, answer: Tensor) -> float:
    """By how much the model liked other tokens better than those of an answer, at most."""
    logits = model(torch.cat([prompt, answer])[None, :-1])[0, len(prompt) - 1 :]  # (n, V)
    gap = logits.max(-1).values - logits.gather(1, answer[:, None])[:, 0]
    return (gap / logits.std(-1)).max().item()
