"""CompleteP and muP beyond the model: the optimizer's groups, and the rules for batch size and weight decay.

The multipliers of the forward pass and the initial weights follow from `DecoderArgs` (`width_multiplier`,
`depth_multiplier`, `sigma`, `score_scale`): models/block.py, models/decoder.py, models/initialization.py.
"""

from .groups import GROUPS, Settings, group_of, group_settings
from .rules import Scale, run_scale, scale_of

__all__ = ["GROUPS", "Scale", "Settings", "group_of", "group_settings", "run_scale", "scale_of"]
