"""Drop-in optimizers: `from lowprec.optim import StableAdamW`."""

from lowprec.optim.schedules import param_groups
from lowprec.optim.stable_adamw import StableAdamW

__all__ = ["StableAdamW", "param_groups"]
