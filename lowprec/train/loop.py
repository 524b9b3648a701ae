"""The training loop: step, buffer, flush, evaluate, save."""

import contextlib
import signal
from collections.abc import Iterator

from torch import Tensor

from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.optim.paging import forget_peak
from lowprec.optim.schedules import learning_rate, set_learning_rate
from lowprec.runs.read import ENDED
from lowprec.runs.record import Record
from lowprec.train.build import Built
from lowprec.train.checkpoint import Saver
from lowprec.train.loggers import Logger
from lowprec.train.metrics import Ended, MetricsBuffer, is_due
from lowprec.train.signals import StopRequest, StopWaiting
from lowprec.train.snapshots import SnapshotRecorder
from lowprec.train.step import GraphedStep, TrainStep, can_capture


class Progress:
    """Ignores progress reports; a display overrides the methods."""

    chance: dict[str, float] = {}  # of the last evaluation: results by guessing

    def doing(self, what: str) -> None:
        """The run starts something slow, such as "evaluating"."""

    def at(self, step: int) -> None:
        """A step begins."""

    def flushed(self, row: dict) -> None:
        """A flush wrote the last step's row; `row` has its throughput and timing, too."""

    def ended_before(self, row: dict) -> None:
        """The run is not trained again; `row` is the last of its record."""

    def close(self) -> None:
        """The attempt has ended, possibly with an error."""


def scheduled_rate(config: Config, step: int) -> float:
    """The learning rate of a step."""
    return learning_rate(
        step,
        peak=config.optimizer.lr,
        num_steps=config.num_steps,
        warmup_steps=config.schedule.warmup_steps,
        shape=config.schedule.name,
    )


class Stepper:
    """Takes the steps of a run: `stepper(step, batch)` sets the learning rate and updates.

    The first call captures the step as a CUDA graph, where possible; at `precision_change.step`,
    the precision changes and the step is captured again. `frozen` is a 0-d bool on the device, set
    once the loss is not finite; from then on the model no longer changes.
    """

    def __init__(self, built: Built):
        self.config, self.optimizer, self._built = built.config, built.state.optimizer, built
        self._train_step = TrainStep(built.task, built.state.optimizer, built.state.scaler)
        self._update: TrainStep | GraphedStep | None = None  # None: to be built
        self._change = built.config.precision_change.step  # None: no change is to come
        self.frozen = self._train_step.frozen
        built.task.model.train()
        forget_peak(built.device)

    def __call__(self, step: int, batch: Batch) -> dict[str, Tensor | float]:
        """Returns the step's values on the device and its learning rate, "lr", on the host."""
        if self._change is not None and step >= self._change:
            self._built.use_precision(self.config.precision_at(step))
            self.close()
            self._change = None
        if self._update is None:
            captures = can_capture(self.config, self._built.device)
            self._update = GraphedStep(self._train_step, batch) if captures else self._train_step
        lr = scheduled_rate(self.config, step)
        set_learning_rate(self.optimizer, lr)
        return {"lr": lr, **self._update(batch)}

    def close(self) -> None:
        """Frees the CUDA graph, which the frames of an error would keep."""
        if isinstance(self._update, GraphedStep):
            self._update.close()
        self._update = None


def train(
    built: Built,
    record: Record,
    *,
    provenance: dict | None = None,
    progress: Progress | None = None,
    logger: Logger | None = None,
    stop: StopRequest | None = None,
) -> Ended:
    """Trains a built run from its newest checkpoint to its end, and completes the record.

    The caller closes the record. `provenance` must equal the checkpoint's, see
    `refuse_mismatch`. Once `stop` is raised in any rank, all ranks save and stop after the same
    step. Returns finished, diverged, preempted (stopped) or failed (too many unreadable samples).
    """
    progress = progress or Progress()
    saver = Saver(built.state, record, built.config, provenance or {})
    first = saver.restore() + 1
    metrics = MetricsBuffer(built, record, logger or Logger(), progress.flushed)
    metrics.require_record(first - 1)
    stop = stop or StopRequest()
    with (
        contextlib.closing(Stepper(built)) as take_step,
        contextlib.closing(built.batches_from(first)) as batches,
    ):
        ended = _train(built, first, take_step, batches, saver, metrics, progress, stop)
        built.world.heartbeat(None, "ending")
        record.finish_stream()
        if ended.state in ENDED:
            metrics.require_record(ended.step)
            record.write_parquet()
        record.status(ended.state, ended.step, ended.reason)  # before data workers are waited for
    return ended


def _train(
    built: Built,
    first: int,
    take_step: Stepper,
    batches: Iterator[Batch],
    saver: Saver,
    metrics: MetricsBuffer,
    progress: Progress,
    stop: StopRequest,
) -> Ended:
    config, world, record = built.config, built.world, metrics.record
    snapshots = SnapshotRecorder(built.state, record.run, config, saver.provenance, world.is_first)
    snapshots.begin(first - 1)
    evaluation = built.evaluation()

    def evaluate() -> dict:
        world.heartbeat(None, "evaluating")
        progress.doing("evaluating")
        results = evaluation(built.task.model)
        progress.chance = evaluation.chance
        return results

    def flush(step: int, evaluating: bool = False) -> Ended | None:
        ended = metrics.flush(evaluate if evaluating else None)
        world.heartbeat(step, "saving")
        snapshots.after_flush(step, metrics.spikes)
        return ended

    for step in range(first, config.num_steps + 1):
        world.heartbeat(step, "waiting for data")
        try:
            with stop.waiting(interruptible=world.size == 1):
                batch = metrics.wait_for(batches)
        except StopWaiting:
            world.heartbeat(step, "saving")
            ended = flush(step - 1) if len(metrics.buffer) else None
            if ended is None and step > first:
                saver.save(step - 1, stop.number)
            return ended or Ended("preempted", step - 1, signal.Signals(stop.number).name)
        world.heartbeat(step, "training")
        progress.at(step)
        metrics.append(step, take_step(step, batch))
        metrics.append_blocks(step, batch)
        is_last = step == config.num_steps
        stopping = world.stop_consensus(stop.number)
        evaluating = evaluation is not None and (is_last or is_due(step, config.eval_every))
        saving = is_last or stopping is not None or is_due(step, config.save_every)
        if evaluating or saving or is_due(step, config.log_every) or metrics.is_full:
            ended = flush(step, evaluating)
            if ended is not None:
                return ended
        if saving:
            saver.save(step, stopping)
        if stopping and not is_last:
            return Ended("preempted", step, signal.Signals(stopping).name)
    return Ended("finished", config.num_steps)
