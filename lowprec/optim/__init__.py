"""Drop-in optimizers: `from lowprec.optim import StableAdamW`."""

import lowprec.ops  # noqa: F401, says if triton is missing
from lowprec.optim.schedules import param_groups
from lowprec.optim.stable_adamw import StableAdamW

__all__ = ["StableAdamW", "param_groups"]
