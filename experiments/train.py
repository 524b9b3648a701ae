"""Trains one CLIP model, or with -m every run of a sweep.

    python -m experiments.train model=nano optimizer=stable_adamw num_steps=200
    python -m experiments.train -m experiment=loss_curves_demo
    torchrun --nproc_per_node 8 -m experiments.train distributed=ddp model=vit_b32

For completion in bash, put a script `train` with `python -m experiments.train "$@"` on the PATH:

    eval "$(train -sc install=bash)"; complete -o nospace -o default -F hydra_bash_completion train

Repeating the command resumes; if the run has finished it says so. The exit status is 0 if the run
finished or diverged (a result, too), 75 if it was stopped by a signal, 1 if it failed, 2 if the
config is wrong.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from rich import get_console
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from experiments import entry
from lowprec.config.schema import Config
from lowprec.runs.attempts import STOPPED
from lowprec.runs.identity import label
from lowprec.sweep.status import number, print_table, setting_columns
from lowprec.train.preflight import preflight
from lowprec.train.ranks import place
from lowprec.waiting import Waiting

NUMBERS = 72  # characters beside the name of a run: a bar, its numbers and the note
MAIN_SCORES = ("zero_shot/top1", "retrieval/image_to_text_r1")  # in the table of a sweep


class ProgressBar:
    """Shows a run's steps, loss and throughput; see `lowprec.train.loop.Progress`.

    Without a terminal, rank 0 prints lines.
    """

    def __init__(self, config: Config):
        self.name, self.num_steps = entry.sweep.own or label(config), config.num_steps
        prints_lines = place()[0] == 0 and not sys.stdout.isatty()
        self.waiting = Waiting(f"{self.name}: loading") if prints_lines else None
        self.batch_size, self.train_s = config.batch_size, 0.0
        self.start: tuple[float, int] | None = None  # time and step at which training began
        self.last: dict = {}
        self.chance: dict[str, float] = {}
        short = Column(no_wrap=True, max_width=max(20, get_console().width - NUMBERS))
        kinds = (MofNCompleteColumn, TimeRemainingColumn)
        numbers = [kind(table_column=Column(no_wrap=True)) for kind in kinds]
        name, note = TextColumn("{task.description}", table_column=short), "{task.fields[note]}"
        self.bar = Progress(name, BarColumn(bar_width=None), *numbers, TextColumn(note))
        self.task = self.bar.add_task(escape(self.name), total=config.num_steps, note="")

    def doing(self, what: str) -> None:
        """Shows a slow activity; the bar appears at the first call."""
        self.bar.start()
        self.bar.update(self.task, note=what)
        if self.waiting and what:
            self.waiting.doing = f"{self.name}: {what}"

    def at(self, step: int) -> None:
        """Shows the step that begins."""
        self.bar.update(self.task, completed=step - 1)
        self.start = self.start or (time.monotonic(), step)
        if self.waiting:
            text = f"{self.name}: step {step} of {self.num_steps}"
            if self.last:
                text += ", loss {loss:.3f} at step {step}".format(**self.last)
            if (done := step - self.start[1]) > 0:
                left_s = (time.monotonic() - self.start[0]) * (self.num_steps - step + 1) / done
                left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
                text += f", about {left} left"
            self.waiting.doing = text

    def flushed(self, row: dict) -> None:
        """Shows the last step and the mean throughput; prints the numbers of an evaluation."""
        num_new = row["step"] - self.last.get("step", self.start[1] - 1)
        self.train_s += num_new * row["step_ms"] / 1000
        self.last |= row
        num_images = (row["step"] - self.start[1] + 1) * self.batch_size
        note = f"loss {row['loss']:.3f}  {num_images / self.train_s:.0f} images/s"
        note += f"  {row['memory_gib']:.0f} GiB" if row["memory_gib"] else ""
        self.bar.update(self.task, completed=row["step"], note=note)
        scores = [
            f"{key} {entry.score_text(key, value, self.chance)}"
            for key, value in row.items()
            if "/" in key
        ]
        if scores:
            line = f"{self.name} step {row['step']}: {', '.join(scores)}"
            self.bar.console.print(line, soft_wrap=True, markup=False)

    def ended_before(self, row: dict) -> None:
        """Keeps the last row of a run that is not trained again."""
        self.last = row

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self.waiting:
            self.waiting.close()
        if self.bar.live.is_started:
            self.bar.stop()


def main(
    config: Config, expected: str | None = None, results: list | None = None, **options: Any
) -> None:
    """Trains a run, as its only process or as one rank; `expected` and options: see `train_run`.

    Appends the run's overrides, state and last row to `results`.
    """
    results = [] if results is None else results
    sys.stderr = sys.__stderr__  # see the end of this file
    preflight(config)
    progress, state = ProgressBar(config), "failed"
    # a refused command loads no torch
    with hidden("timm", "transformers", "wandb"):  # open_clip would import them
        import lowprec.clip  # noqa: F401
    from lowprec.train.build import pick_device
    from lowprec.train.distributed import DistributedRanks, PeerFailed, Ranks
    from lowprec.train.run import train_run
    from lowprec.train.step import can_capture

    world = Ranks()
    if place()[1] > 1:
        captures = can_capture(config, pick_device(config.device))
        world = DistributedRanks(config.device, config.distributed.timeout_s, captures=captures)
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(sys.stdout if world.is_first else nowhere):
            try:
                ended = train_run(config, world, progress, expected, **options)
                state = ended.state if ended else "ended before"
            except PeerFailed:
                time.sleep(1)  # the rank that failed says why, before this exit ends all ranks
                sys.exit(1)
            finally:
                progress.close()
                results.append((entry.sweep.overrides, state, progress.last))
    stops = ended is not None and ended.stop_requested and entry.sweep.is_here
    if stops or (ended is not None and ended.state == "preempted"):
        print("stopped; the same command continues" + " the sweep" * entry.sweep.is_here)
        sys.exit(STOPPED)


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Lets imports of packages fail as if they were not installed, unless they are loaded already.

    open_clip would spend seconds on timm and transformers, for models that configs refuse.
    """
    absent = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


def show_results(results: list[tuple[tuple[str, ...], str, dict]]) -> None:
    """Prints a table of the runs of a sweep that were trained in this process."""
    names, settings = setting_columns([overrides for overrides, _, _ in results])
    scores = [key for key in MAIN_SCORES if any(key in row for _, _, row in results)]
    rows = []
    for values, (_, state, row) in zip(settings, results, strict=True):
        numbers = [number(row, key) for key in ("loss", *scores)]
        rows.append([*values, state, str(row.get("step", "")), *numbers])
    print_table([*names, "state", "step", "loss", *scores], rows, Console())


if __name__ == "__main__":
    if place()[2]:  # one rank per machine reports the faults of a command
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (until main is reached)
    trained: list[tuple[tuple[str, ...], str, dict]] = []
    try:
        entry.run_command(partial(main, results=trained), "train", preflight=preflight)
    finally:
        if len(trained) > 1:
            show_results(trained)
