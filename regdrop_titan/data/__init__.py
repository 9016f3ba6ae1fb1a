from .packed import DataError, PackedDataset

__all__ = ["DataError", "PackedDataset"]
