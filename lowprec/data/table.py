"""Makes shards from a table (CSV) of image paths and captions."""

import csv
import io
import shutil
from functools import partial
from pathlib import Path

from PIL import Image
from webdataset import TarWriter

from lowprec.config.patterns import listing
from lowprec.data.jobs import num_cores, run_jobs
from lowprec.data.loader import BAD_IMAGE, decode_caption, decode_image
from lowprec.data.tar import parse_label
from lowprec.nearest import nearest

SAMPLES_PER_SHARD = 2000
LISTED = 100  # bad rows in a message
Row = tuple[int, dict]  # its line in the table, and its fields by column


def write_shards(
    table: Path, out: Path, columns: list[str], *, skip_bad: bool, num_processes: int | None
) -> int:
    """Writes the rows of a table as `out/00000.tar`, ...; a sample's key is its line in the table.

    `columns` names the columns of images, captions and, optionally, class numbers; paths are
    relative to the table. `out` appears when it is complete. Returns the number of rows that
    training could not read, which are left out if `skip_bad`.

    Raises ValueError with the faults of all such rows otherwise or if no row is good, and for an
    existing `out` or a missing column; csv.Error if the file is no table.
    """
    if out.exists():
        raise ValueError(f"{out} exists; delete it, or choose another folder")
    rows, faults = read_table(table, columns), []
    unfinished = out.with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted command
    unfinished.mkdir(parents=True)
    try:
        starts = range(0, len(rows), SAMPLES_PER_SHARD)
        jobs = [
            (unfinished / f"{n:05}.tar", rows[start : start + SAMPLES_PER_SHARD])
            for n, start in enumerate(starts)
        ]
        write = partial(_write_shard, folder=table.parent, columns=columns)
        for of_shard in run_jobs(write, jobs, num_processes or num_cores(), f"writing {out}"):
            faults += of_shard
        if len(faults) == len(rows) or faults and not skip_bad:
            listed = listing(faults, "\n  ", LISTED)
            raise ValueError(f"{len(faults)} of {len(rows)} rows cannot be read:\n  {listed}")
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return len(faults)


def read_table(path: Path, columns: list[str]) -> list[Row]:
    """The rows of a file with tabs, commas or semicolons; ValueError unless it has the columns."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        separator = max("\t,;", key=file.readline().count)
        file.seek(0)
        lines = csv.DictReader(file, delimiter=separator)
        names = lines.fieldnames or []
        for name in columns:
            if name not in names:
                raise ValueError(f"no column {name} in {', '.join(names)}{nearest(name, names)}")
        return [(lines.line_num, row) for row in lines]


def _write_shard(job: tuple[Path, list[Row]], *, folder: Path, columns: list[str]) -> list[str]:
    """Writes the good rows of a shard; returns the faults of the others."""
    path, rows = job
    faults = []
    with open(path, "wb") as file, TarWriter(file, encoder=False, mtime=0) as tar:
        for line, row in rows:
            try:
                if None in row or None in row.values():
                    raise ValueError("more or fewer fields than columns")
                members = _members(folder, *(row[name] for name in columns))
            except BAD_IMAGE as error:
                reason = getattr(error, "strerror", None) or error
                faults.append(f"line {line} ({row[columns[0]]}): {reason}")
            else:
                tar.write({"__key__": f"{line:09}", **members})
    if len(faults) == len(rows):
        path.unlink()  # an index refuses an empty shard
    return faults


def _members(folder: Path, image: str, caption: str, label: str | None = None) -> dict[str, bytes]:
    """The files of a sample, by suffix; raises one of BAD_IMAGE if training could not read them."""
    data, text = (folder / image).read_bytes(), caption.encode()
    decode_image(data, size=1)
    decode_caption(text)
    suffix = {"PNG": "png", "WEBP": "webp"}.get(Image.open(io.BytesIO(data)).format, "jpg")
    if label is None:
        return {suffix: data, "txt": text}
    if parse_label(label.encode()) < 0:
        raise ValueError(f"the class is {label!r}, not a number")
    return {suffix: data, "txt": text, "cls": label.encode()}
