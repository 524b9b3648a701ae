"""Pre-spike snapshots: earlier training states, kept in host memory until a loss spike occurs.

A snapshot is a checkpoint of a step before the spike, `snapshots/step_<step>`, written when a flush
reports a loss spike, a divergence or, with `recorder.rms`, an RMS spike. Batches are not kept:
`batches_from(step)` computes them from the config and the step, so that a replay needs only a state
and its step.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lowprec.config.schema import Config
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs.attempts import CheckpointError, DamagedError, saved_steps, step_of
from lowprec.train.checkpoint import list_checkpoints, remove_leftovers, save_checkpoint, verify
from lowprec.train.distributed import ONE_PROCESS
from lowprec.train.state import TrainState


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint's files in memory, with the interface of the TrainState they came from."""

    step: int
    contents: dict[str, bytes]
    world = ONE_PROCESS

    def files(self) -> dict[str, bytes]:
        """See TrainState."""
        return self.contents


class SnapshotRecorder:
    """Keeps the states of two flushes, and writes the right one when a spike is detected.

    A spike is detected up to `within` steps after it began, and reported by the next flush. The
    two are that much plus `recorder.steps` apart: one of them is always at least `recorder.steps`
    older than the spike, unless training began later. Only rank 0 records (`is_first`), with
    `recorder.enabled`.
    """

    def __init__(
        self, state: TrainState, run: Path, config: Config, provenance: dict, is_first: bool = True
    ):
        self.state, self.run, self.provenance = state, run, provenance
        self.settings = config.diagnostics.recorder
        self.enabled = self.settings.enabled and is_first
        late = config.diagnostics.spikes.within or Protocol.within
        self.interval = self.settings.steps + late + config.log_every
        self.snapshots: list[Snapshot] = []

    def begin(self, step: int) -> None:
        """Takes the first snapshot, the state that training starts or resumes from.

        Removes snapshots of later steps, which the resume has cut off.
        """
        if self.enabled:
            remove_leftovers(self.run / "snapshots")
            for path in saved_steps(self.run / "snapshots"):
                if step_of(path) > step:
                    shutil.rmtree(path)
            self.snapshots = [Snapshot(step, self.state.files())]

    def after_flush(self, step: int, spikes: list[tuple[int, str]]) -> None:
        """Writes a snapshot for each spike of this flush; takes a new one if one is due.

        `spikes`: their steps and what they are, such as "divergence".
        """
        if not self.enabled:
            return
        for spike, what in spikes:
            self._save(spike, what)
        if step - self.snapshots[-1].step >= self.interval:
            del self.snapshots[:-1]  # first, so that its memory serves the next
            self.snapshots.append(Snapshot(step, self.state.files()))

    def _snapshot_for(self, step: int) -> Snapshot | None:
        """The newest one at least `recorder.steps` before a step, else the oldest before it."""
        earlier = [s for s in self.snapshots if s.step < step]
        far = [s for s in earlier if s.step <= step - self.settings.steps]
        return next(iter(far[-1:] or earlier), None)

    def _save(self, step: int, what: str) -> None:
        """Writes one for a spike unless an earlier spike has; a failure is only a warning."""
        own, folder = self._snapshot_for(step), self.run / "snapshots"
        if own is None or (folder / f"step_{own.step:09d}").exists():
            return
        keep, provenance = self.settings.keep, self.provenance
        try:
            path = save_checkpoint(folder, own.step, own, {}, keep=keep, provenance=provenance)
            print(f"{path}: written to replay the {what} at step {step}")
        except CheckpointError as error:
            print(f"warning: snapshot of the {what} at step {step}: {error}")


def state_before(run: Path, step: int, margin: int) -> tuple[Path, dict]:
    """The newest intact snapshot or checkpoint at least `margin` steps before a step; its manifest.

    If none is that early, the oldest at least 2 steps earlier. CheckpointError if there is none.
    """
    states = sorted([*saved_steps(run / "snapshots"), *list_checkpoints(run)], key=step_of)
    earlier = [path for path in states if step_of(path) < step - 1]
    early = [path for path in earlier if step_of(path) <= step - margin]
    for path in [*reversed(early), *(path for path in earlier if path not in early)]:
        try:
            return path, verify(path)
        except DamagedError as error:
            print(f"warning: {error}; trying another state")
    steps = ", ".join(str(step_of(path)) for path in states) or "no step"
    begin = f", enough for step {step_of(states[0]) + 2} and later" if states else ""
    raise CheckpointError(
        f"{run}: step {step} is replayed from a snapshot or checkpoint of step {step - 2} or "
        f"earlier, and no intact one is there: there are those of {steps}{begin}. A finished run "
        "keeps its last checkpoint alone; a new run keeps more with a smaller save_every and "
        "keep_checkpoints=2 or more, or before spikes with diagnostics.recorder.enabled=true"
    )
