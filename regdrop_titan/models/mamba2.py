"""The Mamba2 sublayer (spec sec. 4; Dao and Gu, arXiv 2405.21060).

    in_proj -> z, x, B, C, dt        dt = softplus(dt + dt_bias), A = -exp(A_log), both fp32
    x, B, C -> causal convolution of width 4, SiLU
    h_t = exp(dt A) h_{t-1} + dt x_t (outer) B_t,    y_t = C_t . h_t + D x_t
    out_proj(RMSNorm(y * SiLU(z)))

Shapes: B sequences, S tokens, H heads of P channels (H P = d_in = 2 d), G groups of B and C, N state channels.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..opaque import opaque, replaced
from .args import DecoderArgs
from .cache import Cache, State
from .scan import ssd_scan
from .sharded import local

DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 0.1, 1e-4  # initial time steps, log-uniform


class CausalConv(nn.Module):
    """Depthwise causal convolution over time, and SiLU. (B, S, channels) -> the same."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor, starts: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        """`state`: the width - 1 inputs before the sequence (B, width-1, channels), None for zeros. Nothing is read
        across `starts` (B, S), where documents begin."""
        weight, bias = local(self.weight).to(x.dtype), local(self.bias).to(x.dtype)
        S, channels = x.shape[1:]
        width = weight.shape[1]
        inputs = with_state(x, state, width - 1)  # (B, S + width - 1, channels)
        if starts is None and S == 1:  # where a convolution is slow to start
            return F.silu((inputs * weight.t()).sum(1, keepdim=True) + bias)
        if starts is None:
            return F.silu(F.conv1d(inputs.transpose(1, 2), weight[:, None], bias, groups=channels).transpose(1, 2))
        document = F.pad(starts.int().cumsum(1), (width - 1, 0))
        out = bias
        for k in range(width):
            same = document[:, k : k + S] == document[:, width - 1 :]
            out = out + torch.where(same[..., None], inputs[:, k : k + S], 0) * weight[:, k]
        return F.silu(out)


def with_state(inputs: Tensor, state: Tensor | None, length: int) -> Tensor:
    """`inputs` (B, S, channels) behind the `length` inputs before them, zeros where there is no state."""
    if state is None:
        return F.pad(inputs, (0, 0, length, 0))
    return torch.cat([state.to(inputs.dtype), inputs], dim=1)


class StateSpace(nn.Module):
    """The parameters that set the scan's decay, one a head. They stay fp32 under mixed precision: `exp(A_log)` in bf16
    is off by 0.8 %. So the decoder calls this module outside of the blocks, and FSDP2 has another policy for it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, dt_bias and D of this rank's heads, each (H,), at least fp32."""
        A_log, dt_bias, D = (local(p).to(torch.promote_types(p.dtype, torch.float32)) for p in self.parameters())
        return -A_log.exp(), dt_bias, D


class InProjection(nn.Module):
    """`[z | x | B | C | dt]` of the published models, in four parts, so that tensor parallel can split z, x and dt by
    heads and keep B and C whole."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.z = nn.Linear(args.dim, args.d_inner, bias=False)
        self.x = nn.Linear(args.dim, args.d_inner, bias=False)
        self.bc = nn.Linear(args.dim, 2 * args.n_groups * args.state_size, bias=False)
        self.dt = nn.Linear(args.dim, args.ssm_heads, bias=False)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bc = self.bc(h)
        return self.z(h), self.x(h), local(bc), self.dt(h)


class GatedNorm(nn.Module):
    """`RMSNorm(y * silu(z))`: the gate comes before the norm. Over the channels of each group of B and C, those of
    other ranks included."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels))
        self.groups = groups
        self.group_channels = channels // groups
        self.eps = eps

    def forward(self, y: Tensor, z: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        gated = (y * F.silu(z)).to(torch.promote_types(y.dtype, torch.float32))
        grouped = gated.view(*gated.shape[:-1], self.groups, gated.shape[-1] // self.groups)
        mean_square = sum_over_ranks(grouped.square().sum(-1, keepdim=True)) / self.group_channels
        normed = (grouped * torch.rsqrt(mean_square + self.eps)).view(gated.shape).to(y.dtype)
        return normed * local(self.weight).to(y.dtype)


class Carried:
    """The state that one layer starts from, which is never changed, so that recomputation reads it again, and the one
    that it leaves. Not a dataclass: FSDP2 copies those on their way in."""

    def __init__(self, initial: State | None) -> None:
        self.initial = initial
        self.final: State | None = None


class Passed:
    """The states of all layers that one micro-batch starts from and leaves, by the layer's name."""

    def __init__(self, initial: dict[str, State]) -> None:
        self.initial = initial
        self.layers: dict[str, Carried] = {}

    def of(self, layer: str) -> Carried:
        """What a layer reads and writes. An object of its own: compiled blocks, which are alike, must not see names."""
        self.layers[layer] = Carried(self.initial.get(layer))
        return self.layers[layer]

    @property
    def final(self) -> dict[str, State]:
        """Of the layers that have been computed."""
        return {name: carried.final for name, carried in self.layers.items() if carried.final is not None}


@opaque
class MambaContext:
    """What the sublayer reads beside its input."""

    starts: Tensor | None = None  # (B, S) bool, True where a document begins
    parameters: tuple[Tensor, ...] = ()  # A, dt_bias and D of this layer, each (H,) fp32
    carried: Carried | None = None  # this layer's state
    counts: Tensor | None = None  # (B,) int64, the first tokens of each sequence that are real; None: all

    def of_rows(self, rows: Tensor | None) -> "MambaContext":
        """The context of some sequences of the batch: indices (n,), None for all of them."""
        if rows is None or self.starts is None:
            return self
        return MambaContext(self.starts.index_select(0, rows), self.parameters)


class Mamba2(nn.Module):
    """(B, S, d) -> (B, S, d)."""

    input_projections = ("in_proj",)

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.heads = args.ssm_heads  # of this rank, see shard_heads
        self.head_dim = args.ssm_head_dim
        self.groups, self.state_size = args.n_groups, args.state_size
        self.chunk_size = args.chunk_size
        channels = args.d_inner
        self.in_proj = InProjection(args)
        self.conv_x = CausalConv(channels, args.conv_width)
        self.conv_bc = CausalConv(2 * self.groups * self.state_size, args.conv_width)
        self.ssm = StateSpace(self.heads)
        self.norm = GatedNorm(channels, args.n_groups, args.norm_eps)
        self.out_proj = nn.Linear(channels, args.dim, bias=False)
        self.to_heads = self.sum_over_ranks = lambda t: t  # of one rank; tensor parallel sets others

    def context(self, seq_len: int, device: torch.device, documents: Tensor | None) -> MambaContext:
        """`documents` (B, S) cuts scan and convolutions where the document changes."""
        if documents is None:
            return MambaContext()
        return MambaContext(starts=F.pad(documents[:, 1:] != documents[:, :-1], (1, 0)))

    def cached_context(self, cache: Cache) -> MambaContext:
        """The context for the forward that `cache` has begun."""
        reading = cache.reading
        assert reading is not None
        context = MambaContext(counts=reading.counts)
        if reading.documents is not None and reading.document_before is not None:
            before = torch.cat([reading.document_before[:, None], reading.documents[:, :-1]], dim=1)
            context.starts = reading.documents != before
        return context

    def own_context(self, shared: MambaContext, layer: str, passed: Passed | None) -> MambaContext:
        carried = None if passed is None else passed.of(layer)
        return replaced(shared, parameters=self.ssm(), carried=carried)

    def forward(self, h: Tensor, context: MambaContext) -> Tensor:
        A, dt_bias, D = context.parameters
        z, x, bc, dt = self.in_proj(h)
        carried = context.carried
        initial = None if carried is None else carried.initial
        conv_inputs = x, bc
        x = self.conv_x(x, context.starts, None if initial is None else initial.conv_x)
        bc = self.to_heads(self.conv_bc(bc, context.starts, None if initial is None else initial.conv_bc))
        n, S, _ = x.shape
        B, C = bc.view(n, S, 2, self.groups, self.state_size).unbind(2)
        with torch.autocast(x.device.type, enabled=False):
            dt = F.softplus(dt.to(dt_bias.dtype) + dt_bias)
            if context.counts is not None:  # a token without time leaves the state as it is
                padding = torch.arange(S, device=x.device) >= context.counts[:, None]  # (B, S)
                dt = dt.masked_fill(padding[..., None], 0.0)
            x = x.view(n, S, self.heads, self.head_dim)
            scan_state = None if initial is None else initial.scan
            y, state = ssd_scan(x, dt, A, B, C, D, self.chunk_size, scan_state, context.starts)
            y = self.norm(y.reshape(n, S, self.heads * self.head_dim), z, self.sum_over_ranks)
        if carried is not None:
            carried.final = self.state(conv_inputs, initial, state, context)
        return self.out_proj(y)

    def state(
        self, conv_inputs: tuple[Tensor, Tensor], initial: State | None, scan: Tensor, context: MambaContext
    ) -> State:
        """What the layer hands on, from the inputs of its convolutions and the scan's final state."""
        length = self.conv_x.weight.shape[1] - 1
        before = (None, None) if initial is None else (initial.conv_x, initial.conv_bc)
        n, S, _ = conv_inputs[0].shape
        counts = torch.full((n,), S, device=scan.device) if context.counts is None else context.counts
        at = counts[:, None] + torch.arange(length, device=scan.device)  # (B, width-1), behind the inputs before
        others = None
        if context.starts is not None:  # the next token may read no document but the last one
            document = F.pad(context.starts.int().cumsum(1), (length, 0))
            others = (document.gather(1, at) != document.gather(1, at[:, -1:]))[..., None]
        conv = []
        for t, state in zip(conv_inputs, before, strict=True):
            last = with_state(t, state, length).gather(1, at[..., None].expand(-1, -1, t.shape[2])).detach()
            conv.append(last if others is None else last.masked_fill(others, 0.0))
        conv_x, conv_bc = conv
        return State(conv_x, conv_bc, scan.detach())


def initial_value(name: str, value: Tensor, generator: torch.Generator, args: DecoderArgs) -> Tensor:
    """Fill `value`, fp32, with the initial value of the sublayer's parameter `name` (as "in_proj.z.weight")."""
    match name.split("."):
        case ["ssm", "A_log"]:
            return value.uniform_(1.0, 16.0, generator=generator).log_()
        case ["ssm", "dt_bias"]:
            low, high = math.log(DT_MIN), math.log(DT_MAX)
            dt = value.uniform_(low, high, generator=generator).exp_().clamp_(min=DT_FLOOR)
            return value.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
        case ["ssm", "D"] | ["norm", "weight"]:
            return value.fill_(1.0)
        case ["conv_x" | "conv_bc", _]:
            bound = args.conv_width**-0.5
        case ["in_proj", _, "weight"]:
            bound = args.dim**-0.5
        case ["out_proj", "weight"]:
            # over sqrt(L); under CompleteP the depth is the residual multiplier's, and L the base's
            bound = (args.d_inner * args.n_layers / args.depth_multiplier) ** -0.5
        case _:
            raise ValueError(f"no initial value for {name}")
    return value.uniform_(-bound, bound, generator=generator)  # PyTorch's default for linear and convolution
