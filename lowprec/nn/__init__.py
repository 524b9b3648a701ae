"""Low-precision layers."""

from lowprec.nn.linear import LowPrecisionLinear, SwitchBackLinear

__all__ = ["LowPrecisionLinear", "SwitchBackLinear"]
