"""The training loop: learning rate, loss, backward, step, record, evaluate, save."""

from collections.abc import Callable, Iterator

from lowprec.config import Config
from lowprec.data.loader import Batch
from lowprec.optim.schedules import learning_rate, set_learning_rate
from lowprec.record import Record
from lowprec.train.checkpoint import TrainState, newest_checkpoint, save_checkpoint
from lowprec.train.journal import Ended, Journal
from lowprec.train.loggers import Logger
from lowprec.train.signals import StopRequest
from lowprec.train.step import GraphedStep, TrainStep, can_capture
from lowprec.train.task import ContrastiveTask


def train(
    task: ContrastiveTask,
    state: TrainState,
    batches_from: Callable[[int], Iterator[Batch]],
    record: Record,
    config: Config,
    *,
    evaluate: Callable[..., dict] | None = None,
    logger: Logger | None = None,
    stop: StopRequest | None = None,
    on_flush: Callable[[dict], None] | None = None,
) -> Ended:
    """Trains from the newest checkpoint, or from the start, to the end of the run.

    `batches_from(first)` yields the batches of steps first, first + 1, ... on the host;
    `evaluate(model)` returns numbers that join their step's row; `on_flush` gets the last row and
    throughput after each flush. Returns finished, diverged, or preempted when `stop` was raised.
    """
    device = next(task.model.parameters()).device
    first = restore(state, record) + 1
    step_on_device = TrainStep(task, state.optimizer, state.scaler)
    journal = Journal(state, record, config, device, logger or Logger(), on_flush)
    batches = batches_from(first)
    task.model.train()
    for step in range(first, config.num_steps + 1):
        batch = journal.wait_for(batches)
        if step == first and can_capture(config, device):
            step_on_device = GraphedStep(step_on_device, batch)
        lr = learning_rate(
            step,
            peak=config.optimizer.lr,
            num_steps=config.num_steps,
            warmup_steps=config.schedule.warmup_steps,
            shape=config.schedule.name,
        )
        set_learning_rate(state.optimizer, lr)
        values = step_on_device(batch)
        journal.append(step, lr, values)

        last = step == config.num_steps
        stopping = stop is not None and stop.number is not None
        evaluating = evaluate is not None and (last or _due(step, config.eval_every))
        saving = last or stopping or _due(step, config.save_every)
        if evaluating or saving or _due(step, config.log_every) or journal.is_full:
            verdict = journal.flush((lambda: evaluate(task.model)) if evaluating else None)
            if verdict is not None:
                return verdict
        if saving:
            save_checkpoint(record.run, step, state, record.offsets(), keep=config.keep_checkpoints)
            record.status("running", step)
        if stopping and not last:
            record.append("events", [{"step": step, "signal": stop.number}])
            return Ended("preempted", step, f"signal {stop.number}")
    return Ended("finished", config.num_steps)


def restore(state: TrainState, record: Record) -> int:
    """Loads the newest checkpoint and cuts the record back to it; returns its step, else 0."""
    found = newest_checkpoint(record.run)
    if found is None:
        record.cut({})
        return 0
    path, manifest = found
    state.load(path)
    record.cut(manifest["offsets"])
    return manifest["step"]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
