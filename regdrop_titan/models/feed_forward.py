"""The feed-forward layer: SwiGLU, or a squared ReLU without a gate."""

import torch.nn.functional as F
from torch import Tensor, nn

from .args import DecoderArgs


class FeedForward(nn.Module):
    """`w2(silu(w1 x) * w3 x)` for `ffn = "swiglu"`, `w2(relu(w1 x)^2)` for "relu2". (B, S, d) -> (B, S, d)."""

    def __init__(self, args: DecoderArgs) -> None:
        super().__init__()
        self.gated = args.ffn == "swiglu"
        self.input_projections = ("w1", "w3") if self.gated else ("w1",)
        self.w1 = nn.Linear(args.dim, args.ffn_dim, bias=args.bias)  # gate, or up where there is none
        self.w2 = nn.Linear(args.ffn_dim, args.dim, bias=args.bias)  # down
        if self.gated:
            self.w3 = nn.Linear(args.dim, args.ffn_dim, bias=args.bias)  # up

    def forward(self, *inputs: Tensor) -> Tensor:
        """One input (B, S, d) for both projections, or one each for gate and up (`mask = "per_linear"`)."""
        if not self.gated:
            return self.w2(F.relu(self.w1(inputs[0])).square())
        gate_input, up_input = inputs if len(inputs) == 2 else inputs * 2
        return self.w2(F.silu(self.w1(gate_input)) * self.w3(up_input))
