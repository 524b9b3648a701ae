"""Pre-spike snapshots: earlier training states, kept in host memory until a loss spike occurs.

A snapshot is a checkpoint of a step before the spike, `snapshots/step_<step>`, written when a flush
reports a loss spike or a divergence. Batches are not kept: `batches_from(step)` computes them from
the config and the step, so that a replay needs only a state and its step.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from lowprec.config.schema import Config
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs import durable
from lowprec.runs.attempts import CheckpointError, DamagedError
from lowprec.runs.read import decode_row
from lowprec.train.checkpoint import list_checkpoints, require_space, save_checkpoint, verify
from lowprec.train.distributed import ONE_PROCESS, Ranks
from lowprec.train.state import TrainState


@dataclass(frozen=True)
class Base:
    """A checkpoint's files in memory, with the interface of the TrainState they came from."""

    step: int
    contents: dict[str, list]

    def files(self) -> dict[str, list]:
        """See TrainState."""
        return self.contents

    def num_bytes(self) -> int:
        """See TrainState."""
        return sum(len(chunk) for chunks in self.contents.values() for chunk in chunks)


class SnapshotRecorder:
    """Keeps the states of two flushes (bases), and writes the right one when a spike is detected.

    A spike is detected up to `within` steps after it began, and reported by the next flush. Bases
    are that much plus `recorder.steps` apart: one of the two is always at least `recorder.steps`
    older than the spike, unless training began later. Rank 0 alone records, and only with
    `recorder.enabled`.
    """

    def __init__(
        self,
        state: TrainState,
        run: Path,
        config: Config,
        provenance: dict,
        world: Ranks = ONE_PROCESS,
    ):
        self.state, self.run, self.config, self.provenance = state, run, config, provenance
        self.settings = config.diagnostics.recorder
        self.enabled = self.settings.enabled and world.is_first
        late = config.diagnostics.spikes.within or Protocol.within
        self.interval = self.settings.steps + late + config.log_every
        self.bases: list[Base] = []
        self.num_read = 0  # bytes of events.jsonl

    def begin(self, step: int) -> None:
        """Takes the first base, the state that training starts or resumes from.

        Removes snapshots of later steps, which the resume has cut off.
        """
        if not self.enabled:
            return
        shutil.rmtree(self.run / "snapshots" / ".tmp", ignore_errors=True)
        for path in list_snapshots(self.run):
            if step_of(path) > step:
                shutil.rmtree(path)
        self._new_events()
        self.bases = [Base(step, self.state.files())]

    def after_flush(self, step: int) -> None:
        """Writes a snapshot if this flush reported a spike; takes a new base if one is due."""
        if not self.enabled:
            return
        for event in self._new_events():
            if event.get("spike") == "loss":
                self._save(event["step"], "loss spike")
            elif "diverged" in event:
                self._save(event["step"], "divergence")
        if step - self.bases[-1].step >= self.interval:
            del self.bases[:-1]  # first, so that its memory serves the next
            self.bases.append(Base(step, self.state.files()))

    def _new_events(self) -> list[dict]:
        """The rows appended to events.jsonl since the last call."""
        path = self.run / "events.jsonl"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self.num_read)
            rows = file.read().splitlines()
            self.num_read = file.tell()
        return [decode_row(row.decode()) for row in rows]

    def _base_for(self, step: int) -> Base | None:
        """The newest base at least `recorder.steps` before a step, else the oldest before it."""
        earlier = [base for base in self.bases if base.step < step]
        far = [base for base in earlier if base.step <= step - self.settings.steps]
        return next(iter(far[-1:] or earlier), None)

    def _save(self, step: int, what: str) -> None:
        """Writes the base for a spike at a step, unless an earlier spike already has.

        Leaves space for the checkpoints. A failure is a warning and does not end the run.
        """
        base, folder = self._base_for(step), self.run / "snapshots"
        if base is None or (folder / f"step_{base.step:09d}").exists():
            return
        staging = folder / ".tmp"
        try:
            require_space(self.run, base, self.config.keep_checkpoints + 1)
            staging.mkdir(parents=True, exist_ok=True)
            saved = save_checkpoint(
                staging, base.step, base, {}, keep=1, provenance=self.provenance
            )
            os.rename(saved, folder / saved.name)
            durable.sync(folder)
            print(f"{folder / saved.name}: to replay the {what} at step {step}")
            for old in list_snapshots(self.run)[: -self.settings.keep]:
                os.rename(old, staging / old.name)
        except (OSError, CheckpointError) as error:
            print(f"warning: snapshot of the {what} at step {step}: {error}")
        shutil.rmtree(staging, ignore_errors=True)


def list_snapshots(run: Path) -> list[Path]:
    """Committed snapshots of a run, oldest first."""
    return sorted((run / "snapshots").glob("step_*"))


def step_of(path: Path) -> int:
    """The step of a checkpoint's or snapshot's folder."""
    return int(path.name.removeprefix("step_"))


def state_before(run: Path, step: int, margin: int) -> tuple[Path, dict]:
    """The newest intact snapshot or checkpoint at least `margin` steps before a step; its manifest.

    If none is that early, returns the oldest at least 2 steps earlier; else raises CheckpointError.
    """
    found = sorted([*list_snapshots(run), *list_checkpoints(run)], key=step_of)
    earlier = [path for path in found if step_of(path) < step - 1]
    early = [path for path in earlier if step_of(path) <= step - margin]
    for path in [*reversed(early), *(path for path in earlier if path not in early)]:
        try:
            return path, verify(path)
        except DamagedError as error:
            print(f"warning: {error}; trying another state")
    there = ", ".join(str(path.relative_to(run)) for path in found) or "none at all"
    raise CheckpointError(f"{run} has no intact state 2 steps before step {step}; it has: {there}")
