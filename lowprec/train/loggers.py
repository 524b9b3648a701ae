"""Dashboards: copies of the record. A run trains on when one of them fails, hangs or is slow."""

import queue
import threading
from collections.abc import Callable
from pathlib import Path

START_S = 120  # a dashboard may take that long to start
END_S = 60  # and that long to send what is pending when the run has ended
PENDING = 1000  # flushes that it may lag behind


class Logger:
    """Copies nothing: the record is the truth."""

    def log(self, rows: list[dict]) -> None:
        """Takes rows with `step` and numbers."""

    def close(self) -> None:
        """Ends the copy."""


class TensorBoardLogger(Logger):
    """TensorBoard event files under `<run>/tensorboard`."""

    def __init__(self, run: Path, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run / "tensorboard")

    def log(self, rows: list[dict]) -> None:
        """One scalar a number."""
        for row in rows:
            for name, value in row.items():
                if name != "step":
                    self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes what is pending."""
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
        """One history row a step."""
        for row in rows:
            self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        """Ends the wandb run."""
        self._run.finish()


class _Guarded(Logger):
    """Feeds a dashboard from a thread of its own, which training never waits for while it runs.

    The dashboard is left, once and loudly, when it raises, lags PENDING flushes behind, or needs
    more than START_S to start or END_S to end; a thread that hangs dies with the process.
    """

    def __init__(self, name: str, make: Callable[[], Logger]):
        self._name, self._left = name, False
        self._rows: queue.Queue = queue.Queue(PENDING)
        self._started = threading.Event()  # nothing is forked while a dashboard is imported
        self._thread = threading.Thread(target=self._feed, args=(make,), daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            self._leave(f"not started in {START_S} s")

    def _feed(self, make: Callable[[], Logger]) -> None:
        try:
            dashboard = make()
            self._started.set()
            while (rows := self._rows.get()) is not None:
                dashboard.log(rows)
            dashboard.close()
        except BaseException as error:  # whatever it is, SystemExit too, training goes on
            self._leave(f"{type(error).__name__}: {error}")
        finally:
            self._started.set()

    def _leave(self, reason: str) -> None:
        if not self._left:
            print(f"logger={self._name} stopped ({reason}); the record goes on without it")
        self._left = True

    def _put(self, rows: list[dict] | None) -> None:
        try:
            self._rows.put_nowait(rows)
        except queue.Full:
            self._leave(f"{PENDING} flushes behind")

    def log(self, rows: list[dict]) -> None:
        if not self._left:
            self._put(rows)

    def close(self) -> None:
        if self._left:
            return
        self._put(None)
        self._thread.join(END_S)
        if self._thread.is_alive():
            self._leave(f"not ended in {END_S} s")


LOGGERS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def build_logger(name: str, run: Path, config: dict) -> Logger:
    """The logger of a config's `logger.name`. A dashboard that cannot start is left out, loudly."""
    if name == "none":
        return Logger()
    return _Guarded(name, lambda: LOGGERS[name](run, config))
