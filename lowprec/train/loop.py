"""The training loop: learning rate, loss, backward, step, record, evaluate, save."""

from collections.abc import Callable, Iterator

from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.optim.schedules import learning_rate, set_learning_rate
from lowprec.runs.record import Record
from lowprec.train.checkpoint import Saver
from lowprec.train.distributed import ONE_PROCESS, Ranks
from lowprec.train.journal import Ended, Journal
from lowprec.train.loggers import Logger
from lowprec.train.signals import StopRequest
from lowprec.train.snapshots import SnapshotRecorder
from lowprec.train.speed import Tracer
from lowprec.train.state import TrainState
from lowprec.train.step import GraphedStep, TrainStep, can_capture
from lowprec.train.task import ContrastiveTask


def train(
    task: ContrastiveTask,
    state: TrainState,
    batches_from: Callable[[int], Iterator[Batch]],
    record: Record,
    config: Config,
    *,
    provenance: dict | None = None,
    evaluate: Callable[..., dict] | None = None,
    logger: Logger | None = None,
    stop: StopRequest | None = None,
    on_flush: Callable[[dict], None] | None = None,
    on_save: Callable[[], None] = lambda: None,
    flops: int | None = None,
    world: Ranks = ONE_PROCESS,
) -> Ended:
    """Trains from the newest checkpoint, or from the start, to the end of the run.

    `batches_from(first)` yields the batches of steps first, first + 1, ... on the host;
    `evaluate(model)` returns numbers that join their step's row; `on_flush` gets the last row and
    throughput after each flush; `on_save()` follows a checkpoint; `flops`: operations of a pair
    (speed.flops_per_pair); `provenance` (see refuse_drift) must be the checkpoint's. Returns
    finished, diverged, or preempted when `stop` was raised: in several processes by any of them,
    and each stops after the same step.
    """
    device = next(task.model.parameters()).device
    saver = Saver(state, record, config, provenance or {}, world)
    first = saver.restore() + 1
    recorder = SnapshotRecorder(state, record.run, config, saver.provenance, world)
    recorder.begin(first - 1)
    step_on_device = TrainStep(task, state.optimizer, state.scaler)
    journal = Journal(state, record, config, device, logger or Logger(), on_flush, world, flops)
    tracer = Tracer(config.profile and world.is_first, record.run, record.attempt)
    batches = batches_from(first)
    task.model.train()
    stop = stop or StopRequest()
    world.stop_consensus(stop.number)
    if number := world.stop_consensus(stop.number):  # asked while the run was being built
        return Ended("preempted", first - 1, f"signal {number}")
    for step in range(first, config.num_steps + 1):
        world.heartbeat(step, "waiting for data")
        batch = journal.wait_for(batches)
        world.heartbeat(step, "training")
        if step == first and can_capture(config, device):
            step_on_device = GraphedStep(step_on_device, batch)
        lr = rate_of(step, config)
        set_learning_rate(state.optimizer, lr)
        values = step_on_device(batch)
        tracer.step()
        journal.append(step, lr, values)
        journal.append_blocks(step, task.probe, batch)

        last = step == config.num_steps
        stopping = world.stop_consensus(stop.number)
        evaluating = evaluate is not None and (last or _due(step, config.eval_every))
        saving = last or stopping is not None or _due(step, config.save_every)
        if evaluating or saving or _due(step, config.log_every) or journal.is_full:
            verdict = journal.flush((lambda: evaluate(task.model)) if evaluating else None)
            world.heartbeat(step, "saving")
            recorder.after_flush(step)
            if verdict is not None:
                return verdict
        if stopping:
            record.append("events", [{"step": step, "signal": stopping}])
        if saving:
            saver.save(step, must_succeed=last or stopping is not None)
            on_save()
        if stopping and not last:
            return Ended("preempted", step, f"signal {stopping}")
    return Ended("finished", config.num_steps)


def rate_of(step: int, config: Config) -> float:
    """The learning rate of a step of a run."""
    return learning_rate(
        step,
        peak=config.optimizer.lr,
        num_steps=config.num_steps,
        warmup_steps=config.schedule.warmup_steps,
        shape=config.schedule.name,
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
