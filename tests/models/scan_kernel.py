"""Run by test_scan_kernel: the kernels of the GPU scan, under Triton's interpreter, against the plain scan."""

import torch
from triton.runtime import autotuner

from regdrop_titan.models import scan

autotuner.Autotuner._bench = lambda self, *args, **kwargs: [1.0] * 3  # no GPU to time on: take the first variant


def compare(G: int, S: int, with_state: bool, with_starts: bool, seed: int) -> float:
    """Largest relative error of outputs, final state and gradients of all inputs."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    n, H, P, N = 2, 4, 16, 32
    x, dt, A = draw(n, S, H, P), torch.nn.functional.softplus(draw(n, S, H) - 2), -draw(H).exp()
    B, C, state = draw(n, S, G, N), draw(n, S, G, N), draw(n, H, P, N) if with_state else None
    starts = torch.rand(n, S, generator=generator) < 0.05 if with_starts else None
    results = []
    d_y, d_state = draw(n, S, H, P), draw(n, H, P, N)
    for scanned, dtype in ((scan.kernel_scan, torch.float32), (scan.chunked_scan, torch.float64)):
        inputs = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in (x, dt, A, B, C, state)]
        chunk = () if scanned is scan.kernel_scan else (64,)
        y, final = scanned(*inputs[:5], *chunk, inputs[5], starts)
        loss = (y * d_y.to(dtype)).sum() + (final * d_state.to(dtype)).sum()
        results.append([y, final, *torch.autograd.grad(loss, [t for t in inputs if t is not None])])
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(*results, strict=True))


for case in (
    {"G": 1, "S": 130, "with_state": True, "with_starts": True},
    {"G": 2, "S": 64, "with_state": False, "with_starts": False},
    {"G": 1, "S": 1, "with_state": True, "with_starts": False},
):
    print(f"error {compare(**case, seed=0):.2e}", case, flush=True)

tensors = [torch.randn(1, 64, 1, 16), torch.randn(1, 64, 1, 16), torch.randn(1, 64, 2, 16), -torch.rand(1, 64, 2)]
for tensor in (*tensors, state := torch.randn(1, 2, 16, 16)):
    tensor.requires_grad_()
# what torch.compile relies on: shapes and dtypes of the fake kernels, and the registered gradient
checks = ("test_schema", "test_autograd_registration", "test_faketensor")
print(torch.library.opcheck(scan._gated_linear_attention, (*tensors, state), test_utils=checks))
