"""How benchmarks time a call, check its numbers and write them as lines."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from lowprec.clip.model import image_size
from lowprec.data.loader import Batch
from lowprec.runs.environment import environment, package_version
from lowprec.runs.read import encode_row


class Wrong(Exception):
    """The numbers of a case are not what they should be."""


class Unable(Exception):
    """This device cannot run a case."""


class Lines:
    """Writes one JSON line per measurement to `run_dir/bench/<slug>/<time>.jsonl`.

    The console shows those with a time as a table. `packages`: distributions whose versions a line
    names besides the project's own. `failed` lists the project's own cases that have no number.
    """

    def __init__(
        self, run_dir: str, slug: str, device: torch.device, packages: tuple[str, ...] = ()
    ):
        facts = environment()
        self.slug = slug
        self.common = {
            "device": facts["gpu"] if device.type == "cuda" else facts["cpu"],
            "versions": facts["packages"] | {name: package_version(name) for name in packages},
            "commit": facts["commit"],
        }
        self.folder = Path(run_dir) / "bench"
        self.file_name = f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
        self.failed: list[str] = []

    @contextlib.contextmanager
    def measurement(
        self, case: str, shape: str, dtype: str, *, is_ours: bool = True, **facts: object
    ) -> Iterator[dict]:
        """Yields a dict for the numbers of a line, and writes the line when the block ends.

        Its ms, rate and ratio are rounded to six significant digits. If the block raises, the line
        has no number but a `reason`: `correct` is False after Wrong and None after any other error.
        The exception is caught; a case of ours counts as failed unless the device is Unable to run
        it.
        """
        row = {"slug": self.slug, **self.common, "case": case, "shape": shape, "dtype": dtype}
        row |= {"ms": None, "rate": None, "ratio_to": None, "ratio": None, "correct": True, **facts}
        numbers: dict = {}
        try:
            yield numbers
        except Exception as error:
            numbers.clear()
            first_line = (str(error).strip().splitlines() or [""])[0]
            row["correct"] = False if isinstance(error, Wrong) else None
            row["reason"] = f"{type(error).__name__}: {first_line}"[:300]
            if is_ours and not isinstance(error, Unable):
                self.failed.append(f"{case} {dtype} at {shape}")
        row |= numbers
        for name in ("ms", "rate", "ratio"):
            row[name] = None if row[name] is None else float(f"{row[name]:.6g}")
        path = self.folder / row["slug"] / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(encode_row(row))
        if row["ms"] or "reason" in row:
            print(in_words(row), flush=True)

    def exit_if_failed(self) -> None:
        """Exits with 1 and names those of our cases that were wrong or did not run."""
        if self.failed:
            sys.exit(f"no number for {', '.join(self.failed)}; their lines say why")


def in_words(row: dict) -> str:
    """Formats a line for the console, with the speed-up and the time saved side by side."""
    details = [str(row[name]) for name in ("mode", "direction", "batches") if name in row]
    text = f"{row['case']:24} {' '.join([row['shape'], *details]):50}"
    if "reason" in row:
        return f"{text} {row['reason']}"
    text += f" {row['ms']:9.4g} ms"
    if row["rate"]:
        text += f" {row['rate']:9.5g} {row.get('rate_unit', '/s')}"
    for base, ratio in ((row["ratio_to"], row["ratio"]), ("high", row.get("ratio_to_high"))):
        if ratio:
            text += f" | {ratio:.3f} x, saves {100 * (1 - 1 / ratio):5.1f}% of {base}"
    return text


def check_error(
    name: str, value: Tensor, expected: Tensor, most: float, least: float = 0.0
) -> float:
    """Returns `|value - expected| / |expected|`, Euclidean; raises Wrong beyond [least, most]."""
    expected = expected.float()
    error = ((value.float() - expected).norm() / expected.norm()).item()
    if not least <= error <= most:  # NaN too
        raise Wrong(f"{name} differs by {error:.2g}, expected {least:g} to {most:g}")
    return error


def random_batch(model: nn.Module, size: int, device: torch.device) -> Batch:
    """Returns random pixels and tokens for a model, on the host; page-locked for a GPU."""
    generator = torch.Generator().manual_seed(0)
    side, last = image_size(model), model.vocab_size - 1
    tokens = torch.randint(1, last - 1, (size, model.context_length), generator=generator)
    tokens[:, -1] = last
    pixels = torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator)
    numbers = torch.zeros(size, dtype=torch.int64)
    batch = Batch(pixels, tokens, numbers, numbers)
    return batch.pin_memory() if device.type == "cuda" else batch
