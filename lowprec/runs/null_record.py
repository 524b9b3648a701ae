"""The record of a rank that has none."""

from pathlib import Path

from lowprec.runs.record import Record


class SilentRecord(Record):
    """What a rank other than 0 has in place of the record: it reads the run and writes nothing."""

    def __init__(self, run: Path, attempt: int):
        self.run, self.attempt = Path(run), attempt

    def append(self, name: str, rows: list[dict]) -> None:
        """Nothing."""

    def append_tensors(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def status(self, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def offsets(self) -> dict[str, int]:
        """None: they are rank 0's."""
        return {}

    def cut(self, offsets: dict[str, int]) -> None:
        """Nothing."""

    def write_parquet(self) -> None:
        """Nothing."""

    def finish_stream(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
