"""State passing (Buitrago and Gu, arXiv 2507.02782): a micro-batch starts from the states that the one before left, so
that a Mamba2 model learns to go on from states that it meets behind its training context only. Without gradient.

Row b of a rank's micro-batch starts from what row b of its micro-batch before left: of the step's accumulation, or of
the step before.
"""

import torch
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from .models import DecoderArgs
from .models.mamba2 import Passed, State

KEY = "passed_states"  # in the checkpoint; named by checkpoint.exclude_from_loading, states start from zero


class PassedStates(Stateful):
    """The states of this rank, zero at first.

    They are in the checkpoint under the rank's place, so a run resumes exactly at the same layout, and is refused by
    name at another one.
    """

    def __init__(self, args: DecoderArgs, batch_size: int, dp: tuple[int, int], tp: tuple[int, int], device) -> None:
        """`dp`, `tp`: rank and degree."""
        self.place = f"data_parallel_{dp[0]}_of_{dp[1]}.tensor_parallel_{tp[0]}_of_{tp[1]}"
        channels, heads, width = args.d_inner // tp[1], args.ssm_heads // tp[1], args.conv_width - 1
        bc = 2 * args.n_groups * args.state_size
        self.layers = [str(i) for i, kind in enumerate(args.layer_kinds) if kind == "mamba"]
        self.shapes = {
            "conv_x": (batch_size, width, channels),
            "conv_bc": (batch_size, width, bc),
            "scan": (batch_size, heads, args.ssm_head_dim, args.state_size),
        }
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Start from zero, as after a step whose states may not be finite."""
        self.states = {
            layer: State(**{name: torch.zeros(shape, device=self.device) for name, shape in self.shapes.items()})
            for layer in self.layers
        }
        self.current: Passed | None = None

    def start(self) -> Passed:
        """For the next forward: where it starts from and leaves its own."""
        self.current = Passed(initial=self.states)
        return self.current

    def again(self) -> Passed:
        """For one more forward from where the last one started; what it leaves is not taken."""
        assert self.current is not None
        return Passed(initial=self.current.initial)

    def take(self) -> None:
        """Make what the last forward left the beginning of the next one."""
        assert self.current is not None and self.current.final.keys() == self.states.keys()
        self.states = self.current.final

    def state_dict(self) -> dict[str, Tensor]:
        return {
            f"{self.place}.{layer}.{name}": getattr(state, name).float().contiguous()
            for layer, state in self.states.items()
            for name in self.shapes
        }

    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        self.states = {
            layer: State(**{name: state_dict[f"{self.place}.{layer}.{name}"] for name in self.shapes})
            for layer in self.layers
        }
