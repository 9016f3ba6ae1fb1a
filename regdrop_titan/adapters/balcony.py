"""Balcony exits (Jamialahmadi et al., arXiv 2503.05005; DD): a frozen decoder, the backbone, can stop after k layers
and go on through one layer and one norm that were trained for this place. The head is the backbone's own.

An exit is thus a decoder of k + 1 layers that shares the backbone's modules: `exit_model` makes it, and whatever takes
a decoder takes it.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.loading import resolve_checkpoint, run_config, state_sha256
from ..checkpoints.safety import CheckpointError, load_state
from ..models import Decoder, DecoderArgs
from ..models.block import Block
from ..models.initialization import canonical_name
from ..models.norm import build_norm
from ..models.positions import document_ids

KEY = "exits"  # of the record in config.json, and the prefix of the names in a checkpoint
PUBLISHED = {"271M": (3, 7, 10), "503M": (2, 4, 9, 13), "906M": (3, 6, 12, 17)}  # DD's, of the family celerity
LOGITS = 2**26  # elements of the logits that are held at a time: 256 MiB in fp32


def default_exits(family: str, flavor: str, n_layers: int) -> tuple[int, ...]:
    """DD's exits of a Celerity model of that depth, else after a quarter, half and three quarters of the layers,
    rounded down; not after L-1 layers, where an exit costs what the whole model does."""
    published = PUBLISHED.get(flavor, ()) if family == "celerity" else ()
    if published and published[-1] < n_layers - 1:
        return published
    return tuple(sorted({n_layers * quarters // 4 for quarters in (1, 2, 3)} - {0, n_layers - 1}))


def exit_faults(layers: Sequence[int], n_layers: int) -> list[str]:
    """What is wrong with these exits of a model, a line each."""
    faults = []
    if not layers:
        faults.append(f"there is no place for an exit that saves anything in a model of {n_layers} layers")
    if wrong := sorted({k for k in layers if not 0 < k < n_layers}):
        faults.append(
            f"exit {', '.join(map(str, wrong))}: the model has {n_layers} layers, an exit is after 1 ... {n_layers - 1}"
        )
    if twice := sorted({k for k in layers if list(layers).count(k) > 1}):
        faults.append(f"exit {', '.join(map(str, twice))}: named twice")
    return faults


class Exit(nn.Module):
    """What is trained for one exit, beside the backbone's layers and head."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.block = Block(args, args.layer_kinds[-1])
        self.norm = build_norm(args)

    @torch.no_grad()
    def copy_from(self, backbone: Decoder) -> None:
        """Take the weights of the backbone's last layer and final norm; both sharded alike, or not at all."""
        last = backbone.layers[str(backbone.args.n_layers - 1)]
        for own, source in ((self.block, last), (self.norm, backbone.norm)):
            for mine, theirs in zip(own.parameters(), source.parameters(), strict=True):
                mine.copy_(theirs)


class Exits(nn.ModuleDict):
    """The exits of a model, each under the number k of layers before it.

    Args:
        args: of the backbone. A copy of its last layer keeps what that has: kind, residual multiplier, dropout.
        layers: k of each exit, in 1 ... L-1, all different.

    Raises ValueError for other exits, a line a fault.
    """

    def __init__(self, args: DecoderArgs, layers: Sequence[int]) -> None:
        if faults := exit_faults(layers, args.n_layers):
            raise ValueError("\n".join(faults))
        super().__init__({str(k): Exit(args) for k in sorted(layers)})

    @property
    def places(self) -> list[int]:
        """k of each exit, ascending."""
        return [int(k) for k in self]

    def copy_from(self, backbone: Decoder) -> None:
        """Begin every exit as `Exit.copy_from` says."""
        for each in self.values():
            each.copy_from(backbone)


def exit_args(args: DecoderArgs, k: int) -> DecoderArgs:
    """The arguments of the decoder that exit k of a backbone of `args` is."""
    kinds, scale = args.layer_kinds, args.eval_scale
    return dataclasses.replace(
        args,
        n_layers=k + 1,
        layers=",".join([*kinds[:k], kinds[-1]]),
        eval_scale=None if scale is None else [*scale[:k], scale[-1]],
    )


def assembled(
    args: DecoderArgs,
    layers: dict[str, Any],
    tok_embeddings: nn.Module | None,
    norm: nn.Module | None,
    output: nn.Module | None,
    training: bool,
) -> Decoder:
    """A decoder of modules that are there already. It draws and allocates nothing, and leaves their mode alone."""
    with torch.device("meta"):
        model = Decoder(args)
    model.layers = nn.ModuleDict(layers)
    model.tok_embeddings, model.norm, model.output = tok_embeddings, norm, output  # type: ignore[assignment]
    model.training = training
    return model


def exit_model(backbone: Decoder, exits: Exits, k: int) -> Decoder:
    """Exit k as a decoder of k + 1 layers, on the modules of `backbone` and `exits` themselves.

    CompleteP's multipliers stay those of the whole depth: each block holds its own. Raises ValueError for an exit that
    there is not.
    """
    if str(k) not in exits:
        raise ValueError(f"exit_layer {k}: there are trained exits after {', '.join(exits)} layers")
    own = exits[str(k)]
    assert isinstance(own, Exit)
    blocks = {str(i): backbone.layers[str(i)] for i in range(k)} | {str(k): own.block}
    args = exit_args(backbone.args, k)
    return assembled(args, blocks, backbone.tok_embeddings, own.norm, backbone.output, training=backbone.training)


# Training --------------------------------------------------------------------------------------------------------


class _ExitKL(torch.autograd.Function):
    """KL(teacher || student) of each token, and its gradient with respect to the student's input of the head, made in
    the same pass, a piece of the tokens at a time: no logits outlive their piece. The head takes no gradient."""

    @staticmethod
    def forward(ctx, students: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(students.dtype, torch.float32)
        found = torch.empty(students.shape[:-1], dtype=wide, device=students.device)  # (E, B, S)
        gradient = None
        if ctx.needs_input_grad[0]:  # contiguous, so that the flat one below is a view
            gradient = torch.empty(students.shape, dtype=students.dtype, device=students.device)
        # of all tokens in a row
        inputs, targets, kl = students.flatten(1, 2), teacher.flatten(0, 1), found.flatten(1, 2)
        gradients = None if gradient is None else gradient.flatten(1, 2)
        n = max(1, LOGITS // len(weight))
        for start in range(0, len(targets), n):
            piece = slice(start, start + n)
            log_p = F.linear(targets[piece], weight).to(wide).log_softmax(-1)  # (n, V)
            p = log_p.exp()
            for e in range(len(inputs)):
                log_q = F.linear(inputs[e, piece], weight).to(wide).log_softmax(-1)
                kl[e, piece] = (p * (log_p - log_q)).sum(-1)
                if gradients is not None:  # d KL / d logits = q - p
                    gradients[e, piece] = (log_q.exp() - p).to(weight.dtype) @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return found

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (upstream[..., None] * gradient).to(gradient.dtype), None, None


def exit_kl(students: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """KL(whole model || exit) in nats, of each exit and token: (E, B, S) in fp32 or wider.

    Args:
        students: (E, B, S, d), what the head reads at each exit; takes a gradient.
        teacher: (B, S, d), what it reads behind all layers; takes none.
        weight: (V, d), of the head; takes none.
    """
    return _ExitKL.apply(students, teacher.detach(), weight)


class DecoderWithExits(Decoder):
    """A frozen decoder with trainable exits. Its forward gives no logits but each exit's KL.

    The decoder is in evaluation mode always, the exits follow `train()`.

    Args:
        exits: k of each exit.
        checkpoint: a whole `step-N`, of the decoder's weights.
    """

    def __init__(self, args: DecoderArgs, exits: tuple[int, ...], checkpoint: Path) -> None:
        super().__init__(args)
        self.requires_grad_(False)
        self.exits = Exits(args, exits)
        self.checkpoint = checkpoint

    def train(self, mode: bool = True) -> "DecoderWithExits":
        super().train(False)
        self.exits.train(mode)
        return self

    def backbone_state(self) -> dict[str, Tensor]:
        """The weights of the decoder under the names of its checkpoint, sharded ones as they are."""
        state = {canonical_name(name): value for name, value in self.state_dict().items()}
        return {name: value for name, value in state.items() if not name.startswith(f"{KEY}.")}

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Read the backbone, each rank its shards, and begin the exits as copies of its end. Raises CheckpointError."""
        self.tie_embeddings()
        load_state(self.backbone_state(), self.checkpoint)
        self.exits.copy_from(self)
        self.set_dropout_rate(self.args.p)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """KL(whole model || exit) of each exit and token, (E, B, S), of `tokens` (B, S)."""
        if self.args.document_mask and documents is None:
            documents = document_ids(tokens, self.args.eos_id)
        streams: dict[int, Tensor] = {}
        with torch.no_grad():
            h, through = self.begin(tokens, documents)
            for layer in range(self.args.n_layers):
                if str(layer) in self.exits:
                    streams[layer] = h
                h = through(layer, h)
            teacher = self.norm(h)
        kept = self.kept(h, None, self.args.eval_scale)[-1]
        first, *_ = self.exits.values()
        context = first.block.context(tokens.shape[1], h.device, documents)  # alike for all
        students = [
            own.norm(own.block(streams[int(k)], own.block.own_context(context, k), kept))
            for k, own in self.exits.items()
        ]
        m_d = self.args.width_multiplier
        return exit_kl(torch.stack(students) / m_d, teacher / m_d, self.output.weight)


# Files -----------------------------------------------------------------------------------------------------------


def exits_record(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint of exits in `path` (a dump folder of `train_exits.py`, its `checkpoint`, or one
    `step-N` in that), and what its config.json says of them: "layers", "backbone" and "backbone_sha256".

    Raises CheckpointError where there is none.
    """
    checkpoint = resolve_checkpoint(path)
    record = run_config(checkpoint).get(KEY)
    if not isinstance(record, dict) or not {"layers", "backbone", "backbone_sha256"} <= record.keys():
        raise CheckpointError(f"{checkpoint}: holds no exits; scripts/train_exits.py trains them")
    return checkpoint, record


def load_exits(path: str | Path, backbone: Decoder) -> Exits:
    """The exits in `path`, as `exits_record` reads it, in evaluation mode on the backbone's device.

    Args:
        backbone: with the very weights that they were trained on, in fp32 as `load_model` gives it.

    Raises:
        CheckpointError: there are none, or they are of another model.
    """
    checkpoint, record = exits_record(path)
    found = state_sha256(backbone.state_dict())
    if record["backbone_sha256"] != found:
        raise CheckpointError(
            f"{checkpoint}: exits of another model: they were trained on {record['backbone']} (sha256 of the weights "
            f"{record['backbone_sha256'][:12]}), this one has {found[:12]}"
        )
    exits = Exits(backbone.args, record["layers"])
    state = {f"{KEY}.{name}": value for name, value in exits.state_dict().items()}
    load_state(state, checkpoint, no_dist=True)
    exits.load_state_dict({name.removeprefix(f"{KEY}."): value for name, value in state.items()})
    return exits.to(next(backbone.parameters()).device).eval()
