"""Optimizers, drop-in for those of torch: `from lowprec.optim import StableAdamW`."""

from lowprec.optim.stable_adamw import StableAdamW

__all__ = ["StableAdamW"]
