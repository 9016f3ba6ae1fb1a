"""The head, and the cross-entropy over it without the logits of all tokens at once."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial
from torchtitan.components.loss import IGNORE_INDEX


class Head(nn.Linear):
    """Hidden states to logits, or to the loss itself: FSDP2's and tensor parallel's hooks act where a module is called,
    so what reads the gathered weight lies in its forward."""

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, h: Tensor, labels: Tensor | None = None, pieces: int = 1) -> Tensor:
        """Logits (B, S, V) of `h` (B, S, d); with `labels` (B, S) int64 the cross-entropy summed over them, a scalar
        in fp32 or wider, made in `pieces` (at least 1) pieces of the tokens. Labels of IGNORE_INDEX count nothing."""
        return super().forward(h) if labels is None else summed_cross_entropy(h, self.weight, labels, pieces)


def summed_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, pieces: int) -> Tensor:
    """Arguments and result as `Head.forward`'s; `weight` (V, d), under tensor parallel sharded by vocabulary beside a
    replicated `h`."""
    group, first = None, 0
    if isinstance(weight, DTensor):
        assert isinstance(h, DTensor)
        mesh = weight.device_mesh
        group, weight = mesh.get_group(), weight.to_local()
        first = mesh.get_local_rank() * len(weight)  # config refuses a vocabulary that does not divide
        h = h.to_local(grad_placements=[Partial()])  # each rank's part of the vocabulary gives a part of the gradient
    device = h.device.type
    if torch.is_autocast_enabled(device):  # once, not at each piece, and with the gradient that autocast's own cast has
        dtype = torch.get_autocast_dtype(device)
        h, weight = h.to(dtype), weight.to(dtype)
    return _SummedCrossEntropy.apply(h.flatten(0, 1), weight, labels.flatten(), pieces, first, group)


class _SummedCrossEntropy(torch.autograd.Function):
    """The loss and, in the same pass, its gradients, a piece of the tokens at a time: no logits outlive their piece.
    The sum's upstream gradient is one number, so the backward pass only multiplies."""

    @staticmethod
    def forward(
        ctx, h: Tensor, weight: Tensor, labels: Tensor, pieces: int, first: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        """`h` (T, d); `weight` (V, d), of the entries `first` ... of the vocabulary, the others being with the other
        ranks of `group`; `labels` (T,)."""
        wide = torch.promote_types(h.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=h.device)
        wants_h, wants_weight = ctx.needs_input_grad[:2]
        of_h = torch.empty_like(h) if wants_h else None
        # wide: rounded to bf16 after each piece, the sum would lose what later ones add
        of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
        n = max(1, -(-len(h) // pieces))
        for start in range(0, len(h), n):
            x, y = h[start : start + n], labels[start : start + n]
            counted = y != IGNORE_INDEX
            own = counted & (y >= first) & (y < first + len(weight))
            at = (y - first).where(own, 0)[:, None]
            logits = F.linear(x, weight)  # (n, V)
            log_p = F.log_softmax(logits, -1, dtype=wide)
            if group is not None:
                mine = logits[:, 0] - log_p[:, 0]  # log-sum-exp of this rank's logits
                log_p += (mine - _logsumexp_over_ranks(mine, group))[:, None]
            del logits
            loss -= log_p.gather(1, at)[:, 0].where(own, 0).sum()
            if not (wants_h or wants_weight):
                continue
            # d loss / d logits = p - 1 at the label; what does not count is left out of the thinner factors
            p = log_p.exp_().scatter_add_(1, at, -own[:, None].to(wide)).to(weight.dtype)
            if of_h is not None:
                of_h[start : start + n] = (p @ weight) * counted[:, None]
            if of_weight is not None:
                x = x * counted[:, None]
                if x.dtype == wide:
                    of_weight.addmm_(p.T, x)
                else:
                    of_weight += p.T @ x
            del log_p, p  # before the next piece's
        if group is not None:
            dist.all_reduce(loss, group=group)
        ctx.save_for_backward(of_h, None if of_weight is None else of_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        of_h, of_weight = (None if g is None else (g * upstream).to(g.dtype) for g in ctx.saved_tensors)
        return of_h, of_weight, None, None, None, None


def _logsumexp_over_ranks(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    top = t.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    total = (t - top).exp()
    dist.all_reduce(total, group=group)
    return top + total.log()
