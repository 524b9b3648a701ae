"""Trains like `experiments.train` and measures what may announce a loss spike.

    python -m experiments.predictors -m experiment=early_warnings_mini

Before every second step, one Hessian-vector product with the step's batch gives the curvature of
arXiv:2506.04805; the same pass gives the kurtosis of the patch embedding's gradient and of each
block's output. They are rows of `predictors.jsonl` in the run directory. The run needs AdamW
without clipping, loss scaling or low precision, in one process.
"""

from operator import attrgetter

from experiments import train
from experiments.entry import run_command
from lowprec.config.check import ConfigError
from lowprec.config.schema import Config
from lowprec.data.open import open_data
from lowprec.runs.identity import directory
from lowprec.train.preflight import preflight
from lowprec.train.source_digests import sources_of

NEEDED = {
    "optimizer.name": "adamw",
    "optimizer.optim_bits": 32,
    "optimizer.beta2_decay": None,
    "optimizer.lr_scale": None,
    "scaler.name": "none",
    "precision.recipe": "high",
    "precision_change.step": None,
    "distributed.name": "none",
    "accumulate": 1,
}


def check(config: Config) -> None:
    """Raises ConfigError for a run that cannot be measured."""
    given = {key: attrgetter(key)(config) for key in NEEDED}
    wrong = [key for key, value in given.items() if value != NEEDED[key]]
    if wrong:
        raise ConfigError([f"{k}={given[k]}: predictors need {k}={NEEDED[k]}" for k in wrong])
    preflight(config)


def main(config: Config) -> None:
    """Trains a run and measures it; RunError if steps of a run that has ended were not measured."""
    check(config)
    from experiments.curvature import build_measured, refuse_unmeasured  # loads torch

    results: list[tuple] = []
    train.main(config, results=results, build_objects=build_measured)
    [(_, state, row)] = results
    if state == "ended before":
        run = directory(config, sources_of(config, open_data(config)))
        refuse_unmeasured(run, row.get("step", 0))


if __name__ == "__main__":
    run_command(main, "train", preflight=check)
