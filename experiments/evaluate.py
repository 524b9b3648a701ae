"""Evaluates the newest checkpoint of a run.

    python -m experiments.evaluate run=runs/run/nano-bf16-adamw-s0-0123456789
    python -m experiments.evaluate run=... evaluation=both precision=fp16

The evaluation, its data and its prompts are those of the run, except for the keys that the command
sets. Prints the results and appends them to the run's `evaluations.jsonl`; changes nothing else.
With shown=8, the run's `retrieved.jsonl` holds eight images of the validation set, at equal
distances, with the captions nearest to each, which `analysis.report` shows with the step; a later
evaluation without `shown` keeps them.
"""

import base64
import io
import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from experiments.entry import run_command, score_text
from lowprec.config.check import ConfigError
from lowprec.config.schema import Config, OptimizerConfig, key
from lowprec.data.open import open_data
from lowprec.data.shards import Shards
from lowprec.runs import durable
from lowprec.runs.attempts import step_of
from lowprec.runs.read import encode_row, read_config
from lowprec.train.preflight import preflight
from lowprec.waiting import Waiting

SIDE, LONGEST = 96, 200  # of what retrieved.jsonl stores: pixels, and characters of a caption


@dataclass
class EvaluatedPrecision:
    """The precision of the evaluation: `precision=fp16` and so on; recipes are the run's."""

    autocast: str | None = key(
        None, "dtype of the evaluation; null: the run's", choices=("fp32", "bf16", "fp16")
    )


@dataclass
class ChosenEvaluation:
    """The tasks of the evaluation: `evaluation=both` and so on."""

    name: str | None = key(
        None, "tasks; null: the run's", choices=("zero_shot", "retrieval", "both")
    )


@dataclass
class EvaluateConfig:
    """Which run to evaluate, and on which data."""

    run: str = key("???", "a run directory")
    precision: EvaluatedPrecision = field(default_factory=EvaluatedPrecision)
    evaluation: ChosenEvaluation = field(default_factory=ChosenEvaluation)
    val: str | None = key(None, "glob of the validation shards; null: the run's")
    classnames: str | None = key(None, "class names of these shards: a file, or 'imagenet'")
    templates: str | None = key(None, "prompt templates for these shards: a file, or 'imagenet'")
    index: str | None = key(None, "folder of the index of these shards")
    shown: int = key(0, "images to store with their nearest captions", least=0, most=8)
    device: str = key("auto", "device of the evaluation", choices=("auto", "cpu", "cuda"))


def main(config: EvaluateConfig) -> None:
    """Builds the run's model, loads its newest checkpoint and evaluates it."""
    run = Path(config.run)
    trained = read_config(run)
    trained = evaluated_config(trained, config)
    if trained.evaluation.name == "none":
        raise ConfigError([f"{run} has evaluation=none: choose zero_shot, retrieval or both"])
    if config.shown and trained.evaluation.name == "zero_shot":
        raise ConfigError([f"shown={config.shown} needs evaluation=retrieval or evaluation=both"])
    try:
        preflight(trained, training=False)
        with closing(Waiting(f"evaluating {run}")):
            row, results, chance = evaluated(run, trained, config)
    except ConfigError as error:  # in this command's keys
        own = r"(?<![\w/.])data\.(val|classnames|templates|index)\b(?!/)"
        raise ConfigError(re.sub(own, r"\1", fault) for fault in error.faults) from None
    with open(run / "evaluations.jsonl", "a") as file:
        file.write(encode_row(row | results))
    print(f"{'step':28} {row['step']} of {trained.num_steps}")
    print(f"{'val':28} {row['val']}")
    for name, value in results.items():
        print(f"{name:28} {score_text(name, value, chance)}")


def evaluated(
    run: Path, trained: Config, config: EvaluateConfig
) -> tuple[dict, dict[str, float], dict[str, float]]:
    """What was evaluated, the results, and a guessing model's results."""
    # a refused command loads no torch
    from lowprec.train.build import build
    from lowprec.train.checkpoint import find_checkpoint

    checkpoint = find_checkpoint(run)
    trained = trained.at_step(step_of(checkpoint))  # its other recipe may not run here
    trained.precision.autocast = config.precision.autocast or trained.precision.autocast
    built = build(trained, open_data(trained, training=False))
    built.state.load(checkpoint, model_only=True)
    evaluation = built.evaluation()
    evaluation.num_shown = config.shown
    results = evaluation(built.task.model)
    row = {"step": step_of(checkpoint), "val": trained.data.val}
    if evaluation.nearest:
        rows = [row | retrieved(built.data.val, *pair) for pair in evaluation.nearest.items()]
        durable.replace(run / "retrieved.jsonl", "".join(map(encode_row, rows)).encode())
    return row | {"autocast": trained.precision.autocast}, results, evaluation.chance


def retrieved(val: Shards, image: int, nearest: list[int]) -> dict:
    """A row of retrieved.jsonl: a small JPEG in base64, its caption and the nearest captions."""
    from PIL import Image

    pairs = [val.read_pair(*val.locate(sample)) for sample in (image, *nearest)]
    caption, *captions = (text.decode("utf-8", "replace")[:LONGEST] for _, text in pairs)
    picture, file = Image.open(io.BytesIO(pairs[0][0])).convert("RGB"), io.BytesIO()
    picture.thumbnail((SIDE, SIDE))
    picture.save(file, "JPEG", quality=80)
    jpeg = base64.b64encode(file.getvalue()).decode()
    return {"sample": image, "jpeg": jpeg, "caption": caption, "nearest": captions}


def evaluated_config(trained: Config, config: EvaluateConfig) -> Config:
    """Changes a run's config for an evaluation, in place, and returns it.

    With other validation shards, the run's class names and templates do not apply. The optimizer,
    whose package may be missing, is AdamW.
    """
    if config.val:
        trained.data.classnames = trained.data.templates = None
    for name in ("val", "classnames", "templates", "index"):
        setattr(trained.data, name, getattr(config, name) or getattr(trained.data, name))
    trained.data.cache = trained.model.init_from = None
    trained.optimizer = OptimizerConfig()
    trained.evaluation.name = config.evaluation.name or trained.evaluation.name
    trained.device, trained.compile = config.device, False
    return trained


if __name__ == "__main__":
    run_command(main, "evaluate", EvaluateConfig)
