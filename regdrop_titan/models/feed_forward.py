"""The SwiGLU feed-forward layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from .args import DecoderArgs


class FeedForward(nn.Module):
    """`w2(silu(w1 x) * w3 x)`, no biases. (B, S, d) -> (B, S, d)."""

    input_projections = ("w1", "w3")

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=False)  # gate
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=False)  # down
        self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=False)  # up

    def forward(self, *inputs: Tensor) -> Tensor:
        """One input (B, S, d) for both projections, or one each for gate and up (`mask = "per_linear"`)."""
        gate_input, up_input = inputs if len(inputs) == 2 else inputs * 2
        return self.w2(F.silu(self.w1(gate_input)) * self.w3(up_input))
