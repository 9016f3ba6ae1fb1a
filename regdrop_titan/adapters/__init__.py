"""Small trained parts beside a model whose weights stay as they are: Balcony exits."""

from .balcony import Exits, exit_model, load_exits

__all__ = ["Exits", "exit_model", "load_exits"]
