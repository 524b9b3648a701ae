"""Optimizers, drop-in for those of torch: `from lowprec.optim import StableAdamW`."""

from lowprec.optim.stable_adamw import StableAdamW
from lowprec.optim.statistics import second_moment_statistics

__all__ = ["StableAdamW", "second_moment_statistics"]
