"""Makes shards from a table (CSV) of image paths and captions."""

import contextlib
import csv
import io
import shutil
from pathlib import Path

from rich.console import Console
from rich.progress import track
from webdataset import ShardWriter

from lowprec.data.loader import BAD_IMAGE, LARGEST_IMAGE, decode_caption, decode_image
from lowprec.data.sources import listing
from lowprec.data.tar import parse_label
from lowprec.nearest import nearest
from lowprec.runs.durable import DiskError
from lowprec.runs.read import open_file

SAMPLES_PER_SHARD = 2000


def write_shards(table: Path, out: Path, columns: list[str], skip_bad: bool = False) -> int:
    """Writes the rows of a table as `out/00000.tar`, ...; a sample's key is its line in the table.

    `columns` names the columns of images, captions and, optionally, class numbers. Paths of images
    are relative to the table or else to the working directory. `out` appears when it is complete.
    If `skip_bad`, rows that training could not read are left out and counted.

    Raises ValueError with all faults of the rows otherwise or if no row is good, and for an
    existing `out`, a missing column or a file that is no table, and DiskError if it cannot write.
    """
    if out.exists():
        raise ValueError(f"{out} exists; delete it, or choose another folder")
    rows, faults = read_table(table, columns), []
    # absolute: ShardWriter takes what begins like `pipe:` for a command
    unfinished = out.absolute().with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an interrupted command
    made = [folder for folder in unfinished.parents if not folder.exists()]
    try:
        unfinished.mkdir(parents=True)
        pattern = str(unfinished).replace("%", "%%") + "/%05d.tar"
        with ShardWriter(pattern, SAMPLES_PER_SHARD, verbose=0, encoder=False, mtime=0) as shards:
            for line, row in track(rows, f"reading {table}", console=Console(stderr=True)):
                try:
                    sample = _sample(table.parent, row, columns)
                except BAD_IMAGE as error:
                    reason = getattr(error, "strerror", None) or error
                    faults.append(f"line {line} ({row[columns[0]]!r}): {reason}")
                else:
                    shards.write({"__key__": f"{line:09}", **sample})
        if len(faults) == len(rows) or faults and not skip_bad:
            listed = listing(faults, "\n  ", limit=100)
            hint = "; skip_bad=true leaves them out" if len(faults) < len(rows) else ""
            count = f"{len(faults)} of {len(rows)} rows cannot be read"
            raise ValueError(f"{count}, so nothing was written{hint}:\n  {listed}")
        unfinished.rename(out)
    except OSError as error:
        raise DiskError(unfinished, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):  # the first that holds something, such as `out`
            for folder in made:
                folder.rmdir()
    return len(faults)


def read_table(path: Path, columns: list[str]) -> list[tuple[int, dict]]:
    """Last line and fields of each row; ValueError unless the first line names the columns."""
    rows = []
    with open_file(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        separator = max("\t,;", key=file.readline().count)
        file.seek(0)
        lines = csv.DictReader(file, delimiter=separator, strict=True)
        try:
            for row in lines:
                rows.append((lines.line_num, row))
        except csv.Error as error:
            line = rows[-1][0] if rows else 1
            raise ValueError(f"the row after line {line} is damaged: {error}") from error
        if not rows:
            raise ValueError("the table has no rows")
        names = lines.fieldnames
        if missing := [name for name in columns if name not in names]:
            left = [name for name in names if name not in columns]
            keys = dict(zip(columns, ("image", "caption", "label"), strict=False))
            matches = _matches({name: keys[name] for name in missing}, left)
            hints = [f"{keys[name]}={match}" for name, match in matches.items()]
            found = f"no column {', '.join(missing)} in {', '.join(names)}"
            raise ValueError(f"{found}, the names in the first line; choose: {' '.join(hints)}")
        if twice := [name for name in columns if names.count(name) > 1]:
            raise ValueError(f"several columns are named {twice[0]} in the first line")
        return rows


def _matches(missing: dict[str, str], left: list[str]) -> dict[str, str]:
    """For each missing column another one that may be meant, or NAME.

    It is named like the column's key (`image`), or similarly, or the last left. `missing`: keys by
    column.
    """
    found = {}
    for name, key in missing.items():
        similar = nearest(name, left).removeprefix("; nearest: ")
        found[name] = key if key in left else similar or "NAME"
        left = [other for other in left if other != found[name]]
    unknown = [name for name in missing if found[name] == "NAME"]
    return found | (dict(zip(unknown, left, strict=True)) if len(unknown) == len(left) == 1 else {})


def _sample(folder: Path, row: dict, columns: list[str]) -> dict[str, bytes]:
    """The files of a row, by suffix; raises one of BAD_IMAGE if training could not read them."""
    if None in row or None in row.values():
        raise ValueError("more or fewer fields than columns")
    image, *texts = [row[name] for name in columns]
    path = folder / image if (folder / image).exists() else Path(image)
    if not path.exists():
        raise ValueError(f"neither {folder / image} nor {image} exists")
    caption, *labels = [text.encode() for text in texts]
    with open_file(path) as file:
        data = file.read(LARGEST_IMAGE + 1)
    decode_image(data, size=1)
    decode_caption(caption)
    if any(parse_label(label) < 0 for label in labels):
        raise ValueError(f"the class is {row[columns[2]]!r}, not a number")
    suffix = "png" if data[1:4] == b"PNG" else "webp" if data[8:12] == b"WEBP" else "jpg"
    return dict(zip((suffix, "txt", "cls"), (data, caption, *labels), strict=False))
