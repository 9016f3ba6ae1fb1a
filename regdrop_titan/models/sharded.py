"""Parameters that tensor parallel has split, read by modules that are none of its own."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
