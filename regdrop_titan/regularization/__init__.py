from .dropout import inverted_dropout, vpad, vpad_coefficients

__all__ = ["inverted_dropout", "vpad", "vpad_coefficients"]
