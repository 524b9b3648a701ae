"""A run's checkpoints as the training loop sees them: restore once, save now and then."""

from pathlib import Path

from lowprec.config.schema import Config
from lowprec.runs.provenance import refuse_drift
from lowprec.runs.record import Record
from lowprec.train.checkpoint import (
    newest_checkpoint,
    require_space,
    retire,
    save_checkpoint,
    sweep,
)
from lowprec.train.state import CheckpointError, TrainState
from lowprec.train.world import ALONE, World

SAVE_FAILURES = 3  # in a row end the run; until then training goes on from memory


class Saver:
    """Restores a run to its newest whole checkpoint and commits new ones.

    Rank 0 chooses and verifies, all read; a failure is one of all ranks.
    """

    def __init__(
        self,
        state: TrainState,
        record: Record,
        config: Config,
        provenance: dict,
        world: World = ALONE,
    ):
        self.state, self.record, self.config = state, record, config
        self.provenance = provenance
        self.world = world
        self.failures = 0

    def restore(self) -> int:
        """Loads the newest checkpoint and cuts the record back to it; returns its step, else 0."""
        run = self.record.run
        found = self.world.first(self._choose)
        if found is None:
            self.record.cut({})
            print(f"{run}: from step 0")
            return 0
        path, manifest, drift = found
        self.world.together(lambda: self.state.load(Path(path)))
        if self.world.is_first:
            retire(run, self.config.keep_checkpoints)
        self.record.cut(manifest["offsets"])
        if drift:
            self.record.append("events", [{"step": manifest["step"], "drift": drift}])
        print(f"{run}: going on from step {manifest['step']}")
        return manifest["step"]

    def _choose(self) -> tuple[str, dict, list[str]] | None:
        """The checkpoint to go on from, its manifest, what has changed since; None: there is none.

        Whatever speaks against going on is a CheckpointError.
        """
        run = self.record.run
        sweep(run)
        require_space(run, self.state, self.config.keep_checkpoints)
        found = newest_checkpoint(run, set_aside=True)
        if found is None:
            saved = self.record.last_status()["saved"]
            if saved:
                raise CheckpointError(f"{run} was saved at step {saved}; its checkpoints are gone")
            return None
        path, manifest = found
        if manifest["step"] > self.config.num_steps:
            raise CheckpointError(
                f"{run} is at step {manifest['step']}, beyond num_steps={self.config.num_steps}"
            )
        drift = refuse_drift(
            path,
            manifest["provenance"],
            self.provenance,
            allow_code=self.config.resume.allow_drift,
            allow_layout=self.config.resume.allow_reshard,
        )
        return str(path), manifest, drift

    def save(self, step: int, *, must_succeed: bool) -> None:
        """Commits a checkpoint.

        A failure is an event, and the next one tries again; the third in a row, or one of a
        checkpoint that must succeed, is a CheckpointError.
        """
        try:
            save_checkpoint(
                self.record.run,
                step,
                self.state,
                self.record.offsets(),
                keep=self.config.keep_checkpoints,
                provenance=self.provenance,
                world=self.world,
            )
        except CheckpointError as error:
            self.failures += 1
            if must_succeed or self.failures == SAVE_FAILURES:
                raise
            print(f"warning: {error}; training goes on and tries again in save_every steps")
            self.record.append("events", [{"step": step, "not saved": str(error)}])
            return
        self.failures = 0
        self.record.status("running", step, saved=step)
