"""A run's checkpoints as the training loop sees them: restore once, save now and then."""

from lowprec.config import Config
from lowprec.record import Record
from lowprec.train.checkpoint import (
    newest_checkpoint,
    require_space,
    retire,
    save_checkpoint,
    sweep,
)
from lowprec.train.provenance import refuse_drift
from lowprec.train.state import CheckpointError, TrainState

SAVE_FAILURES = 3  # in a row end the run; until then training goes on from memory


class Saver:
    """Restores a run to its newest whole checkpoint and commits new ones."""

    def __init__(self, state: TrainState, record: Record, config: Config, provenance: dict):
        self.state, self.record, self.config = state, record, config
        self.provenance = provenance
        self.failures = 0

    def restore(self) -> int:
        """Loads the newest checkpoint and cuts the record back to it; returns its step, else 0."""
        run = self.record.run
        sweep(run)
        require_space(run, self.state, self.config.keep_checkpoints)
        found = newest_checkpoint(run, set_aside=True)
        if found is None:
            saved = self.record.last_status()["saved"]
            if saved:
                raise CheckpointError(f"{run} was saved at step {saved}; its checkpoints are gone")
            self.record.cut({})
            print(f"{run}: from step 0")
            return 0
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
        self.state.load(path)
        retire(run, self.config.keep_checkpoints)
        self.record.cut(manifest["offsets"])
        if drift:
            self.record.append("events", [{"step": manifest["step"], "drift": drift}])
        print(f"{run}: going on from step {manifest['step']}")
        return manifest["step"]

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
