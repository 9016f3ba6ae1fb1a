from .dropout import inverted_dropout, vpad, vpad_coefficients
from .layer_dropout import keep_mask, layer_rates, mean_rate

__all__ = ["inverted_dropout", "keep_mask", "layer_rates", "mean_rate", "vpad", "vpad_coefficients"]
