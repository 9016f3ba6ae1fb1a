"""Mamba2's scan `h_t = exp(dt_t A) h_{t-1} + dt_t x_t (outer) B_t`, `y_t = C_t . h_t + D x_t` (spec sec. 4; Dao and
Gu, arXiv 2405.21060).

Shapes: B sequences, S tokens, H heads of P channels, G groups of B and C, N state channels.

Two engines, chosen by device, and the recurrence itself for a single token. `chunked_scan` is plain PyTorch: it cuts
the sequence into chunks; inside of a chunk the recurrence is written out as a masked matrix product (the state-space
dual); between chunks only states are handed on. Decays are exponentials of differences of cumulative sums, which are
masked *before* the exponential: above the diagonal they would overflow. `kernel_scan` hands the same chunks to the
Triton kernels of fla-core on a GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# A log decay whose exponential is zero in fp32 (the smallest number above it is exp(-103.3)): how the kernels reset
RESET = -104.0
KERNEL_CHUNK = 64  # tokens; of the kernels, whatever `chunk_size`


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    chunk_size: int = 256,
    initial_state: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba2's scan.

    Args:
        x: (B, S, H, P).
        dt: (B, S, H), after softplus.
        A: (H,), negative.
        B, C: (B, S, G, N); head h reads group h // (H/G).
        D: (H,), or None for no skip.
        chunk_size: at least 1. The result does not depend on it; speed and memory do. The kernels have their own.
        initial_state: (B, H, P, N), or None for zeros.
        starts: (B, S) bool, True where a document begins: its state starts from zero, at any place of a chunk.

    Returns:
        y (B, S, H, P) in the dtype of x, and the final state (B, H, P, N). Decays and states are fp32, or fp64 for
        fp64 inputs.

    Raises:
        ValueError: heads that are no multiple of the groups, or a chunk size below 1.
    """
    H, G = x.shape[2], B.shape[2]
    if H % G:
        raise ValueError(f"{H} heads: must be a multiple of the {G} groups of B and C")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    if x.shape[1] == 1:
        y, state = one_step(x, dt, A, B, C, initial_state, starts)
    # the kernels know neither fp64 nor an empty batch
    elif x.is_cuda and x.dtype != torch.float64 and len(x):
        y, state = kernel_scan(x, dt, A, B, C, initial_state, starts)
    else:
        y, state = chunked_scan(x, dt, A, B, C, chunk_size, initial_state, starts)
    # the skip in the wider of both dtypes
    return y if D is None else y + (x * D[:, None]).to(x.dtype), state


def _decays(log: Tensor, documents: Tensor | None) -> Tensor:
    """How much of token j is left at token i: `exp(log_{j+1} + ... + log_i)` for j < i of the same document, 1 for
    j = i, 0 for others. (..., c) -> (..., c, c); documents (..., c).

    The sums are differences of cumulative ones, made in fp64 and kept as two parts of the dtype of `log`: rounded to
    one fp32 number, sums of hundreds of terms would give differences to 1e-5 only. The 1 is a constant: its gradients
    would cancel, and their rounding errors drown those of fast decays.
    """
    sums = log.double().cumsum(-1)
    high = sums.to(log.dtype)
    low = (sums - high).detach().to(log.dtype)
    difference = (high[..., :, None] - high[..., None, :]) + (low[..., :, None] - low[..., None, :])
    c = log.shape[-1]
    earlier = torch.ones(c, c, dtype=torch.bool, device=log.device).tril(-1)
    if documents is not None:
        earlier = earlier & (documents[..., :, None] == documents[..., None, :])
    others = torch.full((c, c), -torch.inf, dtype=log.dtype, device=log.device).fill_diagonal_(0.0)
    return torch.where(earlier, difference, others).exp()


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    initial_state: Tensor | None,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The scan without its skip, in plain PyTorch."""
    n, S, H, P = x.shape
    G, N = B.shape[-2:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    c = min(chunk_size, S)
    K = -(-S // c)
    log = dt.to(dtype) * A.to(dtype)  # of a token's decay
    u = (x * dt[..., None]).to(x.dtype)
    documents = None if starts is None else starts.int().cumsum(1)
    if pad := K * c - S:  # tokens that decay nothing and add nothing, at the end
        u, B, C = (F.pad(t, (0, 0, 0, 0, 0, pad)) for t in (u, B, C))
        log = F.pad(log, (0, 0, 0, pad))
        documents = None if documents is None else torch.cat([documents, documents[:, -1:].expand(n, pad)], dim=1)

    u = u.view(n, K, c, H, P).transpose(2, 3)  # (B, K, H, c, P)
    B, C = (t.view(n, K, c, G, N).transpose(2, 3) for t in (B, C))  # (B, K, G, c, N)
    log = log.view(n, K, c, H).transpose(2, 3)  # (B, K, H, c)
    document = None if documents is None else documents.view(n, K, 1, c)

    def by_group(t: Tensor) -> Tensor:  # (B, K, H, ...) -> (B, K, G, H/G, ...)
        return t.reshape(n, K, G, H // G, *t.shape[3:])

    # inside of a chunk: y_i = sum over j <= i of (C_i . B_j) decay(i, j) u_j
    within = _decays(log, document)  # (B, K, H, c, c)
    scores = C @ B.transpose(-1, -2)  # (B, K, G, c, c)
    y = (by_group(within.to(x.dtype)) * scores[:, :, :, None]) @ by_group(u)  # (B, K, G, H/G, c, P)

    # what each chunk leaves: sum over j of decay(end, j) u_j (outer) B_j
    left = by_group(u * within[..., -1, :, None].to(x.dtype))
    added = (left.transpose(-1, -2) @ B[:, :, :, None]).reshape(n, K, H, P, N).to(dtype)

    # between chunks: the state behind chunk k, from what the chunks before left and from the initial state
    before = torch.zeros(n, H, P, N, dtype=dtype, device=x.device) if initial_state is None else initial_state.to(dtype)
    pieces = torch.cat([before[:, None], added], dim=1)  # (B, K+1, H, P, N)
    # the document at the end of each chunk; before the first token it is 0
    ends = None if document is None else F.pad(document[:, :, 0, -1], (1, 0))  # (B, K+1)
    between = _decays(F.pad(log.sum(-1).transpose(1, 2), (1, 0)), None if ends is None else ends[:, None])
    states = torch.einsum("bhkj,bjhpn->bkhpn", between, pieces)

    # from the state before the chunk: y_i += decay(i, beginning) C_i . state
    since = log.cumsum(-1).exp()  # (B, K, H, c)
    if document is not None and ends is not None:
        since = since * (document == ends[:, :-1, None, None])
    carried = by_group(states[:, :-1].to(x.dtype)).transpose(-1, -2)  # (B, K, G, H/G, N, P)
    y = y + (C[:, :, :, None] @ carried) * by_group(since.to(x.dtype))[..., None]
    y = y.reshape(n, K, H, c, P).transpose(2, 3).reshape(n, K * c, H, P)[:, :S]
    return y, states[:, -1]


def one_step(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan of a single token, S = 1, as the recurrence says it."""
    n, _, H, P = x.shape
    G, N = B.shape[-2:]
    dtype = torch.promote_types(x.dtype, torch.float32)
    B, C = (t.to(dtype).repeat_interleave(H // G, dim=2).view(n, H, 1, N) for t in (B, C))
    u = (x.to(dtype) * dt.to(dtype)[..., None]).view(n, H, P, 1)
    before = torch.zeros(n, H, P, N, dtype=dtype, device=x.device) if initial_state is None else initial_state.to(dtype)
    decay = (dt.to(dtype) * A.to(dtype)).exp().view(n, H, 1, 1)
    if starts is not None:
        decay = decay.masked_fill(starts.view(n, 1, 1, 1), 0.0)
    state = torch.addcmul(u * B, before, decay)  # (B, H, P, N)
    y = (state * C).sum(-1).view(n, 1, H, P)
    return y.to(x.dtype), state


def kernel_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan without its skip, by fla-core's kernels of simple gated linear attention: queries C, keys B, values
    dt x, log gates dt A, scale 1. A document starts with a gate that is zero in fp32."""
    log = dt.float() * A.float()  # (B, S, H)
    if starts is not None:
        log = log.masked_fill(starts[..., None], RESET)
    u = (x * dt[..., None]).to(x.dtype)
    n, _, H, P = x.shape
    if initial_state is None:
        before = torch.zeros(n, H, B.shape[-1], P, dtype=torch.float32, device=x.device)
    else:
        before = initial_state.float().transpose(-1, -2)
    y, state, _ = _gated_linear_attention(C, B, u, log, before)
    return y, state.transpose(-1, -2)


def _of_heads(t: Tensor, H: int) -> Tensor:
    """(B, S, G, N) -> (B, S, H, N)."""
    return t.repeat_interleave(H // t.shape[2], dim=2)


def _of_groups(t: Tensor, G: int) -> Tensor:
    """(B, S, H, N) -> (B, S, G, N), summed."""
    return t.unflatten(2, (G, t.shape[2] // G)).sum(3)


# An operator of its own, since torch.compile cannot look into the kernels and must not break its graph at them. B and C
# are repeated for the heads inside of it, so that autograd keeps them by group.
@torch.library.custom_op("regdrop_titan::gated_linear_attention", mutates_args=())
def _gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (B, S, G, N), v (B, S, H, P), log (B, S, H) fp32, state (B, H, N, P) fp32 -> the outputs (B, S, H, P), the
    final state, and the gates' sums over each chunk, which the backward pass reads again."""
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2

    H = v.shape[2]
    sums = chunk_local_cumsum(log.contiguous(), chunk_size=KERNEL_CHUNK, scale=RCP_LN2)  # the kernels use exp2
    out, final = chunk_simple_gla_fwd(
        q=_of_heads(q, H),
        k=_of_heads(k, H),
        v=v.contiguous(),
        g=sums,
        scale=1.0,
        initial_state=state.contiguous(),
        output_final_state=True,
        chunk_size=KERNEL_CHUNK,
    )
    return out.to(v.dtype), final, sums


@_gated_linear_attention.register_fake
def _(q, k, v, log, state):
    return v.new_empty(v.shape), state.new_empty(state.shape), log.new_empty(log.shape)


@torch.library.custom_op("regdrop_titan::gated_linear_attention_backward", mutates_args=())
def _backward(
    d_out: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
    from fla.ops.utils import chunk_local_cumsum

    H, G = v.shape[2], q.shape[2]
    dq, dk, dv, d_log, d_state = chunk_simple_gla_bwd(
        q=_of_heads(q, H),
        k=_of_heads(k, H),
        v=v.contiguous(),
        g=sums,
        g_gamma=None,
        initial_state=state.contiguous(),
        do=d_out.contiguous(),
        dht=d_final.contiguous(),
        scale=1.0,
        chunk_size=KERNEL_CHUNK,
    )
    d_log = chunk_local_cumsum(d_log, chunk_size=KERNEL_CHUNK, reverse=True)
    return _of_groups(dq, G).to(q.dtype), _of_groups(dk, G).to(k.dtype), dv.to(v.dtype), d_log.to(sums.dtype), d_state


@_backward.register_fake
def _(d_out, d_final, q, k, v, sums, state):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, sums, state))


def _save(ctx, inputs, output):
    q, k, v, _, state = inputs
    ctx.save_for_backward(q, k, v, output[2], state)


def _differentiate(ctx, d_out, d_final, _):
    return _backward(d_out, d_final, *ctx.saved_tensors)


_gated_linear_attention.register_autograd(_differentiate, setup_context=_save)
