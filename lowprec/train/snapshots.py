"""The flight recorder: the state of some steps ago, kept in host memory until a spike needs it.

A snapshot is a checkpoint of a step before the spike, `snapshots/step_<step>`, written when the
events of a flush name a loss spike or a divergence. No batch is kept: the batch of a step is a
function of the config and the step (`batches_from(step)`), so that a state and its step are all
that a replay needs.
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
    """The files of a checkpoint after a step, in memory; stands in for the state that saves one."""

    step: int
    contents: dict[str, list]

    def files(self) -> dict[str, list]:
        """As TrainState.files: what is written."""
        return self.contents

    def num_bytes(self) -> int:
        """As TrainState.num_bytes."""
        return sum(len(chunk) for chunks in self.contents.values() for chunk in chunks)


class SnapshotRecorder:
    """Keeps two bases in turn, and writes the right one when a spike is known.

    A spike is known up to `within` steps after it began and then waits for the flush. Bases are
    that much and `recorder.steps` apart, so one of the two is always at least `recorder.steps`
    older than the spike, unless training began later. They are taken at flushes, where the device
    has been waited for anyway. Without `recorder.enabled` nothing is done; of
    several ranks, whose states are the same, rank 0 does it.
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
        self.chosen = config.diagnostics.recorder
        self.enabled = self.chosen.enabled and world.is_first
        late = config.diagnostics.spikes.within or Protocol.within
        self.interval = self.chosen.steps + late + config.log_every
        self.bases: list[Base] = []
        self.num_read = 0  # bytes of events.jsonl

    def begin(self, step: int) -> None:
        """Takes the first base, of the state that training starts or goes on from.

        Snapshots of later steps belong to what the resume has cut off; they are removed.
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
        """Writes a snapshot if the flush of this step made a spike known; takes a base when due."""
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
        """The rows that events.jsonl has got since the last look."""
        path = self.run / "events.jsonl"
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self.num_read)
            rows = file.read().splitlines()
            self.num_read = file.tell()
        return [decode_row(row.decode()) for row in rows]

    def _base_for(self, step: int) -> Base | None:
        """The newest base that is `recorder.steps` older than a step, else the oldest before it."""
        earlier = [base for base in self.bases if base.step < step]
        far = [base for base in earlier if base.step <= step - self.chosen.steps]
        return next(iter(far[-1:] or earlier), None)

    def _save(self, step: int, what: str) -> None:
        """Writes the base for a spike at a step, unless one just before it has had it written.

        What cannot be written is a warning and no reason to end the run. Room is left for the
        checkpoints.
        """
        base, folder = self._base_for(step), self.run / "snapshots"
        if base is None or (folder / f"step_{base.step:09d}").exists():
            return
        staging = folder / ".tmp"
        try:
            # a snapshot is one checkpoint more
            require_space(self.run, base, self.config.keep_checkpoints + 1)
            staging.mkdir(parents=True, exist_ok=True)
            kept = {"keep": 1, "provenance": self.provenance}
            saved = save_checkpoint(staging, base.step, base, {}, **kept)
            os.rename(saved, folder / saved.name)
            durable.sync(folder)
            print(f"{folder / saved.name}: to replay the {what} at step {step}")
            for old in list_snapshots(self.run)[: -self.chosen.keep]:
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
    """The newest whole snapshot or checkpoint `margin` steps before a step, and its manifest.

    Without one so early, the oldest from which a step before the step can be replayed, too.
    CheckpointError names what there is.
    """
    found = sorted([*list_snapshots(run), *list_checkpoints(run)], key=step_of)
    earlier = [path for path in found if step_of(path) < step - 1]
    early = [path for path in earlier if step_of(path) <= step - margin]
    for path in [*reversed(early), *(path for path in earlier if path not in early)]:
        try:
            return path, verify(path)
        except DamagedError as error:
            print(f"warning: {error}; another state is tried")
    there = ", ".join(str(path.relative_to(run)) for path in found) or "none at all"
    raise CheckpointError(f"{run} has no whole state 2 steps before step {step}; there is {there}")
