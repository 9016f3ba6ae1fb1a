from .parallelize import parallelize

__all__ = ["parallelize"]
