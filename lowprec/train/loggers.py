"""Dashboards, which copy the record. Training continues when one fails, hangs or is slow."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

START_S = 120  # time for a dashboard to start
END_S = 60  # time to send pending rows when the run has ended


class Logger:
    """Copies nothing; the base class of dashboards."""

    def log(self, rows: list[dict]) -> None:
        """Logs rows of numbers, each with its `step`."""

    def close(self) -> None:
        """Sends pending rows and ends."""


class TensorBoardLogger(Logger):
    """TensorBoard event files under `<run>/tensorboard`."""

    def __init__(self, run: Path, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run / "tensorboard")

    def log(self, rows: list[dict]) -> None:
        """Writes one scalar per number."""
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


class WandbLogger(Logger):
    """Weights & Biases; WANDB_MODE=offline keeps it under `<run>/wandb`."""

    def __init__(self, run: Path, config: dict):
        import wandb

        self._run = wandb.init(
            project="lowprec",
            dir=run,
            name=run.name,
            id=run.name,
            resume="allow",
            config=config,
            settings=wandb.Settings(x_disable_meta=True),  # a typed URL may hold a password
        )

    def log(self, rows: list[dict]) -> None:
        """Writes one history row per step."""
        for row in rows:
            self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        """Ends the wandb run."""
        self._run.finish()


class _Guarded(Logger):
    """Feeds a dashboard from a daemon thread, for which training does not wait.

    The dashboard is dropped, with one message, when it raises or needs more than START_S to start
    or END_S to end.
    """

    def __init__(self, name: str, make: Callable[[], Logger]):
        self._name, self._dropped = name, False
        self._rows: queue.SimpleQueue = queue.SimpleQueue()
        self._started = threading.Event()  # data workers must not be forked during its imports
        self._thread = threading.Thread(target=self._feed, args=(make,), daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            self._drop(f"not started in {START_S} s")

    def _feed(self, make: Callable[[], Logger]) -> None:
        try:
            dashboard = make()
            self._started.set()
            while (rows := self._rows.get()) is not None:
                dashboard.log(rows)
            dashboard.close()
        except BaseException as error:  # SystemExit too
            self._drop(f"{type(error).__name__}: {error}")
        finally:
            self._started.set()

    def _drop(self, reason: str) -> None:
        if not self._dropped:
            print(f"logger={self._name} stopped ({reason}); training continues without it")
        self._dropped = True

    def log(self, rows: list[dict]) -> None:
        if not self._dropped:
            self._rows.put(rows)

    def close(self) -> None:
        if self._dropped:
            return
        self._rows.put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._drop(f"not ended in {END_S} s")


LOGGERS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def build_logger(name: str, run: Path, config: dict) -> Logger:
    """The logger of a config's `logger.name`. One that cannot start is dropped with a message."""
    if name == "none":
        return Logger()
    return _Guarded(name, lambda: LOGGERS[name](run, config))
