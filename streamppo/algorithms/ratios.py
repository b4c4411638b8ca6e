"""The ratio of two policies from its logarithm, without overflow."""

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before they are exponentiated: e^20 is 5e8, and float32 still holds its square."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)), of any shape; beyond the bound the gradient is zero."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
