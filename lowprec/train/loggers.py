"""Dashboards: copies of the record. A run trains on when one of them fails."""

from pathlib import Path


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
            project="lowprec", dir=run, name=run.name, id=run.name, resume="allow", config=config
        )

    def log(self, rows: list[dict]) -> None:
        """One history row a step."""
        for row in rows:
            self._run.log({k: v for k, v in row.items() if k != "step"}, step=row["step"])

    def close(self) -> None:
        """Ends the wandb run."""
        self._run.finish()


class _Guarded(Logger):
    """Forwards to a dashboard until it raises once; says so and goes on without it."""

    def __init__(self, inner: Logger, name: str):
        self._inner, self._name = inner, name

    def _try(self, call: str, *arguments: object) -> None:
        try:
            getattr(self._inner, call)(*arguments)
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on)
            print(f"logger={self._name} stopped ({error}); the record goes on")
            self._inner = Logger()

    def log(self, rows: list[dict]) -> None:
        self._try("log", rows)

    def close(self) -> None:
        self._try("close")


LOGGERS = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger}


def build_logger(name: str, run: Path, config: dict) -> Logger:
    """The logger of a config's `logger.name`. A dashboard that cannot start is left out, loudly."""
    if name == "none":
        return Logger()
    try:
        return _Guarded(LOGGERS[name](run, config), name)
    except Exception as error:  # noqa: BLE001
        print(f"logger={name} could not start ({error}); the record goes on without it")
        return Logger()
