"""Indexes webdataset shards: the position of each sample's bytes, and the digest of all bytes.

Each shard is indexed once. The index is a table of offsets and checksums for each shard and one
catalog for the pattern; both end with a digest of themselves. Only images, captions and labels are
read; nothing is unpacked or unpickled, and no member name is used as a path.
"""

import contextlib
import hashlib
import itertools
import os
import sys
import tarfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np

from lowprec.config.check import RunError
from lowprec.data.jobs import num_cores, run_jobs
from lowprec.data.shards import SAMPLE, Shards, load_sealed, sealed
from lowprec.data.sources import expand, listing
from lowprec.data.tar import IMAGES, LostPairsError, StrictHeader, parse_label, read_members
from lowprec.runs import durable

STAMP = ("bytes", "mtime_ns")  # by which an unchanged shard is recognized
ENTRY = np.dtype([*((name, "<i8") for name in (*STAMP, "samples")), ("digest", "S64")])
COUNTED = np.dtype([*ENTRY.descr, ("captions", "<i8")])  # samples with one
WORTH = 2**24  # bytes of shards that justify one more process
PACKED = {b"\x1f\x8b": "gunzip", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz", b"(\xb5/\xfd": "unzstd"}


def open_shards(
    pattern: str, index: str | None = None, *, name: str = "data.train", accept: bool = False
) -> Shards:
    """Opens all shards of a pattern, after indexing new ones under a lock.

    The index is in the folder `index`, or in `.index` beside each shard. Shards that are missing,
    changed or new since the index was made are refused, unless `accept` takes them as the new set.

    A catalog that cannot be read is reported and made again: changes are not noticed then.

    Raises:
        FileNotFoundError: Nothing matches, or the folder is read-only and `index` is None.
        ValueError: Shards are damaged, empty or not those that were indexed; it names them.
    """
    sources = expand(pattern, name)
    files = [_index_file(source, index) for source in sources]
    catalog = _catalog_of(sources)
    file = files[0].parent / f"catalog-{_short_digest(os.path.abspath(pattern))}.npy"
    promised = {}
    try:
        recorded = load_sealed(file)[0]
        promised = {} if accept else _digests(recorded)
        if promised and all(np.array_equal(recorded[n], catalog[n]) for n in ("path", *STAMP)):
            return Shards(sources, files, recorded)
    except (OSError, ValueError) as error:
        if os.path.exists(file) and not accept:
            unnoticed = "the set is indexed anew; changes since it was indexed are not noticed"
            print(f"{name}: {file} cannot be read ({error}): {unnoticed}", file=sys.stderr)
    _index_all(sources, files, catalog, name)
    if promised:
        _refuse_changes(promised, _digests(catalog), name, pattern)
    with contextlib.suppress(OSError, RunError):  # read-only or no locks: the next start looks
        with durable.locked(file.parent / ".lock"):
            durable.replace(file, sealed(catalog))
    return Shards(sources, files, catalog)


def _catalog_of(sources: list[str]) -> np.ndarray:
    """A catalog with the paths and stamps of shards; the rest is zero."""
    paths = np.array([os.path.abspath(source).encode() for source in sources])
    catalog = np.zeros(len(sources), dtype=[("path", paths.dtype), *COUNTED.descr])
    catalog["path"] = paths
    for row, source in enumerate(sources):
        catalog["bytes"][row], catalog["mtime_ns"][row] = _stamp(source)
    return catalog


def _digests(catalog: np.ndarray) -> dict[bytes, bytes]:
    return dict(zip(catalog["path"].tolist(), catalog["digest"].tolist(), strict=True))


def _index_file(source: str, index: str | None) -> Path:
    """The index of a shard; named after its folder too, so several sets may share an `index`."""
    folder, last = os.path.split(source)
    name = f"{last}-{_folder_digest(os.path.abspath(folder))[:8]}.npy"
    return Path(index or os.path.join(folder, ".index"), name)


@cache
def _folder_digest(folder: str) -> str:
    return _short_digest(str(Path(folder).resolve()))


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _index_all(sources: list[str], files: list[Path], catalog: np.ndarray, name: str) -> None:
    """Fills in samples and digest of each shard; a ValueError names all unreadable shards."""
    entries = list(map(_read_entry, sources, files))
    stale = [row for row, entry in enumerate(entries) if entry is None]
    jobs = [(sources[row], files[row]) for row in stale]
    with contextlib.ExitStack() as stack:
        for folder in sorted({files[row].parent for row in stale}):
            try:
                stack.enter_context(durable.locked(folder / ".lock"))
            except (OSError, RunError) as error:
                reason = getattr(error, "strerror", None) or error
                raise FileNotFoundError(
                    f"the index cannot be written to {folder} ({reason}): set data.index=DIR"
                ) from error
        worth = 1 + int(catalog["bytes"][stale].sum()) // WORTH
        indexed = run_jobs(_index_shard, jobs, min(num_cores(), worth), f"indexing {name}")
    for row, entry in zip(stale, indexed, strict=True):
        entries[row] = entry
    if faults := [entry for entry in entries if isinstance(entry, str)]:
        raise ValueError(listing(faults, "; "))
    catalog[list(COUNTED.names)] = np.array(entries, COUNTED)


def _refuse_changes(
    before: dict[bytes, bytes], now: dict[bytes, bytes], name: str, pattern: str
) -> None:
    """Raises a ValueError naming each shard that is missing, changed or new since then."""
    differing = [f"{path.decode()} (missing)" for path in before if path not in now]
    for path in now:
        if before.get(path) != now[path]:
            differing.append(f"{path.decode()} ({'changed' if path in before else 'new'})")
    if differing:
        raise ValueError(
            f"{name}={pattern}: {len(differing)} shards differ from the indexed ones: "
            f"{listing(differing, ', ')}. Training on them makes another run. To accept them: "
            f"python -m experiments.index_shards shards='{pattern}'"
        )


def _stamp(source: str) -> tuple[int, int]:
    state = os.stat(source)
    return state.st_size, state.st_mtime_ns


def _read_entry(source: str, file: Path) -> tuple | None:
    """What COUNTED has of a shard; None if its index is missing, damaged or out of date."""
    with contextlib.suppress(OSError, ValueError):
        entry, table = load_sealed(file)
        if table.dtype == SAMPLE and entry.item()[:2] == _stamp(source):
            return (*entry.item(), _num_captions(table))
    return None


def _index_shard(job: tuple[str, Path]) -> tuple | str:
    """What COUNTED has of a shard, whose index is rebuilt if out of date, or the shard's fault."""
    source, file = job
    if entry := _read_entry(source, file):  # perhaps made by another process meanwhile
        return entry
    stamp = _stamp(source)
    try:
        table, digest = index_tar(source)
        entry = (*stamp, len(table), digest.encode())
        durable.replace(file, sealed(np.array(entry, ENTRY), table))
    except (ValueError, durable.DiskError) as error:
        return str(error)
    return (*entry, _num_captions(table))


def _num_captions(table: np.ndarray) -> int:
    return int((table["text_bytes"] >= 0).sum())


def index_tar(path: str) -> tuple[np.ndarray, str]:
    """The `SAMPLE` table of an uncompressed tar, and the digest of its members' names and bytes.

    A sample is a run of members with one key, each kind once. Samples without an image or a caption
    have a row too, so that a reader can name them. Raises ValueError naming the tar if it is
    damaged, compressed, holds no whole sample (an image with a caption or a class number) or holds
    pairs that would be lost because their names have more dots.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path} is not a file")
    digest = hashlib.sha256()
    rows: list[tuple] = []
    parts: dict[str, tuple[int, int, bytes]] = {}  # kind: place and bytes
    last, words = None, ""
    try:
        with tarfile.open(path, "r:", tarinfo=StrictHeader) as tar:
            for member, key, kind, data in read_members(tar):
                if parts and (key != last or kind in parts):
                    rows.append(_row(parts))
                    parts = {}
                last = key
                name = f"{key}.{kind} {member.size}\n"
                digest.update(name.encode("utf-8", "surrogateescape") + data)
                parts[kind] = member.offset_data, member.size, data
                if kind == "cls" and parse_label(data) < 0:
                    words = words or f"; {member.name} is not a class number (0, 1, ...)"
    except LostPairsError as error:
        raise ValueError(f"{path}: {error}") from error
    except (tarfile.TarError, ValueError) as error:
        raise ValueError(f"{path} {_fault(path, error)}") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    rows += [_row(parts)] if parts else []
    table = np.array(rows, dtype=SAMPLE)
    has_text = (table["text_bytes"] >= 0) | (table["label"] >= 0)
    if not ((table["image_bytes"] >= 0) & has_text).any():
        members = f"KEY.{'|'.join(IMAGES)} and KEY.txt (or KEY.cls, a class number)"
        raise ValueError(
            f"{path} holds no whole sample: adjacent members {members}, where KEY has no dot; its "
            f"first members: {_first_members(path)}{words}"
        )
    return table, digest.hexdigest()


def _fault(path: str, error: Exception) -> str:
    """What is wrong with a file that cannot be read as an uncompressed tar."""
    if " at byte 0:" not in str(error):
        return f"is damaged: {error}"
    with open(path, "rb") as file:
        begin = file.read(6)
    for magic, command in PACKED.items():
        if begin.startswith(magic):
            streamed = "data=stream trains on gz, bz2 and xz as they are"
            return f"is compressed and has no offsets: {command} it; {streamed}"
    return f"is damaged: {error}; perhaps it is not a tar file"


def _first_members(path: str, count: int = 4) -> str:
    """Names of the first files in an undamaged tar, whatever their kind."""
    names = []
    with tarfile.open(path, "r:", tarinfo=StrictHeader) as tar:
        for member in itertools.islice((m for m in tar if not m.isdir()), count):
            names.append(
                ascii(member.name)[1:-1] + " (a link)" * (member.issym() or member.islnk())
            )
    return ", ".join(names) or "none"


def _row(parts: dict[str, tuple[int, int, bytes]]) -> tuple:
    anywhere = next(iter(parts.values()))[0]
    image = next((parts[kind] for kind in IMAGES if kind in parts), (anywhere, -1, b""))
    text = parts.get("txt", (0, -1, b""))
    label = parse_label(parts["cls"][2] if "cls" in parts else b"")
    return *image[:2], *text[:2], label, zlib.crc32(text[2], zlib.crc32(image[2]))
