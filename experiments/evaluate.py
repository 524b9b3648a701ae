"""Evaluates the newest checkpoint of a run.

    python -m experiments.evaluate run=runs/run/nano-bf16-adamw-s0-0123456789 evaluation=both

Prints the numbers and appends them to the run's `evaluations.jsonl`; nothing else is changed.
"""

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError

from experiments import cli
from experiments.open_data import open_data
from experiments.preflight import preflight
from lowprec.config import Config, EvaluationConfig, key
from lowprec.run import encode_row
from lowprec.validate import ConfigError, check


@dataclass
class EvaluateConfig:
    """Which run, on what."""

    run: str = key("???", "a run directory")
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    val: str | None = key(None, "glob of other validation shards than the run's")
    classnames: str | None = key(None, "their class names: a file, or 'imagenet'")
    templates: str | None = key(None, "their prompt templates: a file, or 'imagenet'")
    index: str | None = key(None, "folder of their index")
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))


def main(config: EvaluateConfig) -> None:
    """Builds the run's model, loads its newest checkpoint, evaluates."""
    from experiments.build import build
    from lowprec.train.checkpoint import newest_checkpoint
    from lowprec.train.state import CheckpointError

    run = Path(config.run)
    if config.evaluation.name == "none":
        sys.exit("evaluation=none: choose zero_shot, retrieval or both")
    try:
        trained = read_config(run)
        trained.device = config.device
        trained.evaluation, trained.compile = config.evaluation, False
        data = trained.data
        trained.data = dataclasses.replace(
            data,
            val=config.val or data.val,
            classnames=config.classnames or (None if config.val else data.classnames),
            templates=config.templates or (None if config.val else data.templates),
            index=config.index or data.index,
        )
        trained.model.init_from = None
        preflight(trained, training=False)
        built = build(trained, open_data(trained, training=False))
        found = newest_checkpoint(run)
    except (ConfigError, CheckpointError) as error:
        sys.exit(f"{run} cannot be evaluated:\n{error}")
    if found is None:
        sys.exit(f"{run} has no checkpoint yet")
    path, manifest = found
    with Console().status(f"evaluating {path}"):
        built.state.load(path)
        results = built.evaluation()(built.task.model)
    row = {"step": manifest["step"], "val": trained.data.val, **results}
    with open(run / "evaluations.jsonl", "a") as file:
        file.write(encode_row(row))
    for name, value in results.items():
        print(f"{name:28} {value:.4f}")


def read_config(run: Path) -> Config:
    """The config of a run directory; ConfigError if there is none."""
    if not (run / "config.yaml").exists():
        raise ConfigError([f"run={run}: not a run directory (it has no config.yaml)"])
    try:
        raw = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    except (YAMLError, OSError, OmegaConfBaseException) as error:
        raise ConfigError([f"run={run}: config.yaml is damaged"]) from error
    return check(raw)


if __name__ == "__main__":
    cli.main(main, "evaluate", EvaluateConfig)
