"""The index of a set of webdataset shards: where each sample's bytes lie, and their digest.

Made once for each shard and kept as two small files, a memory-mapped table of offsets and a JSON
header, with one catalog for all shards of a pattern. Members other than images, captions and labels
are never read; nothing is ever unpickled.
"""

import contextlib
import difflib
import fcntl
import glob
import gzip
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from braceexpand import UnbalancedBracesError, braceexpand

from lowprec.data.shards import Shards
from lowprec.data.tar import index_tar

FORMAT = 2  # of the files of an index


def expand(pattern: str, name: str = "data.train") -> list[str]:
    """The files of a glob with braces, sorted.

    FileNotFoundError names the nearest file if there is none, and every member of a brace that
    matches none.
    """
    try:
        found = {part: glob.glob(part) for part in braceexpand(pattern)}
    except UnbalancedBracesError as error:
        raise FileNotFoundError(f"{name}={pattern}: a brace has no partner") from error
    missing = [part for part, paths in found.items() if not paths]
    if len(missing) < len(found):
        if missing:
            some = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise FileNotFoundError(f"{name}={pattern}: {len(missing)} are missing: {some}")
        return sorted({path for part in found.values() for path in part})
    folder = Path(pattern).parent
    while not glob.glob(str(folder)) and folder != folder.parent:
        folder = folder.parent
    here = [str(path) for path in sorted(folder.glob("*"))[:1000]]
    near = difflib.get_close_matches(pattern, here, n=1, cutoff=0)
    hint = f"; nearest: {near[0]}" if near else f"; {folder} is empty"
    hint += "; a [ that is part of a name is written [[]" if "[" in pattern else ""
    raise FileNotFoundError(f"{name}={pattern}: no file matches{hint}")


def open_shards(
    pattern: str,
    index: str | None = None,
    *,
    name: str = "data.train",
    accept: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Shards:
    """Indexes what is not indexed yet (under a lock) and opens all shards of a pattern.

    The index lies in `index`, or in a folder `.index` beside each shard; a catalog of the pattern
    lies in the first of these. Once made, the index is a promise: shards that have since gone,
    changed or come are all named in a ValueError, unless `accept` takes them as the new set.
    `on_progress(done, total)` counts shards. Raises FileNotFoundError (no match, or a read-only
    folder and no `index`) and ValueError (all damaged or empty shards, named).
    """
    sources = expand(pattern, name)
    homes: dict[str, tuple[str, str]] = {}
    absolute, bases = zip(*(_locate(source, homes, index) for source in sources), strict=True)
    found = np.empty(len(sources), dtype=_catalog_type(absolute))
    found["path"] = [path.encode() for path in absolute]
    for row, source in enumerate(sources):
        state = os.stat(source)
        found["bytes"][row], found["mtime_ns"][row] = state.st_size, state.st_mtime_ns
    file = Path(bases[0]).parent / f"catalog-{_short_digest(os.path.abspath(pattern))}.npy"
    known = _read_catalog(file)
    stamp = ("path", "bytes", "mtime_ns")
    paths = [
        f"{base}.tar" if source.endswith(".gz") else source
        for source, base in zip(sources, bases, strict=True)
    ]
    same = known is not None and all(np.array_equal(known[key], found[key]) for key in stamp)
    if not same or not all(os.path.exists(path) for path in set(paths) - set(sources)):
        promised = {}
        if known is not None and not accept:
            promised = dict(zip(known["path"].tolist(), known["digest"].tolist(), strict=True))
        _index_all(sources, bases, found, promised, on_progress)
        if known is not None and not accept:
            _refuse_changes(known, found, name, pattern)
        known = found
        with contextlib.suppress(OSError), _lock(file.parent):  # read-only: the next start looks
            _write_atomically(file, lambda out: np.save(out, found))
    whole = hashlib.sha256(b"".join(known["digest"].tolist())).hexdigest()
    return Shards(paths, [f"{base}.npy" for base in bases], known["samples"], whole, sources)


def _catalog_type(paths: Sequence[str]) -> np.dtype:
    longest = max(len(path.encode()) for path in paths)
    numbers = [(name, "<i8") for name in ("bytes", "mtime_ns", "samples")]
    return np.dtype([("path", f"S{longest}"), *numbers, ("digest", "S64")])


def _read_catalog(file: Path) -> np.ndarray | None:
    with contextlib.suppress(OSError, ValueError, EOFError):
        catalog = np.load(file, mmap_mode="r")
        if catalog.dtype.names == ("path", "bytes", "mtime_ns", "samples", "digest"):
            return catalog
    return None


def _locate(source: str, homes: dict[str, tuple[str, str]], index: str | None) -> tuple[str, str]:
    """Absolute path of a shard, and of its index without the ending; `homes` remembers folders.

    The index is named after the shard's folder too: several sets may share one index folder.
    """
    folder, last = os.path.split(source)
    if folder not in homes:
        place = _short_digest(str(Path(folder).resolve()))[:8]
        homes[folder] = os.path.abspath(folder), place
    absolute, place = homes[folder]
    base = os.path.join(index or os.path.join(folder, ".index"), f"{last}-{place}")
    return os.path.join(absolute, last), base


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _index_all(
    sources: list[str],
    bases: Sequence[str],
    found: np.ndarray,
    promised: dict[bytes, bytes],
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Fills samples and digest of every shard; a ValueError names all that cannot be read.

    `promised`: digests by path, from which the files of the index must not depart.
    """
    faults = []
    for row, (source, base) in enumerate(zip(sources, bases, strict=True)):
        try:
            header = _index_shard(Path(source), base, promised.get(bytes(found["path"][row])))
            found["samples"][row], found["digest"][row] = header["samples"], header["digest"]
        except ValueError as error:
            faults.append(str(error))
        if on_progress:
            on_progress(row + 1, len(sources))
    if faults:
        raise ValueError(_some(faults, "; "))


def _refuse_changes(known: np.ndarray, found: np.ndarray, name: str, pattern: str) -> None:
    """A ValueError that names every shard that is gone, changed or new since the index was made."""
    before = dict(zip(known["path"].tolist(), known["digest"].tolist(), strict=True))
    now = dict(zip(found["path"].tolist(), found["digest"].tolist(), strict=True))
    differences = {
        "missing": [path for path in before if path not in now],
        "changed": [path for path in before if path in now and before[path] != now[path]],
        "new": [path for path in now if path not in before],
    }
    parts = [
        f"{len(paths)} {kind} ({_some([path.decode() for path in paths], ', ')})"
        for kind, paths in differences.items()
        if paths
    ]
    if parts:
        raise ValueError(
            f"{name}={pattern}: not the shards that were indexed: {'; '.join(parts)}. A run on "
            "them would be another run. If they are meant: "
            f"python -m experiments.index_shards shards='{pattern}'"
        )


def _some(items: list[str], separator: str, limit: int = 20) -> str:
    rest = f"{separator}... ({len(items)} in all)" if len(items) > limit else ""
    return separator.join(items[:limit]) + rest


def _index_shard(source: Path, base: str, promised: bytes | None) -> dict:
    """Header of one shard; it and the table (and the tar of a .gz) are made if out of date.

    Where the digest is not the promised one, the files stay as they are: the shard may come back.
    """
    header_file, table_file = Path(f"{base}.json"), Path(f"{base}.npy")
    unpacked = Path(f"{base}.tar") if source.suffix == ".gz" else source
    state = source.stat()
    stamp = {"format": FORMAT, "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}

    def current() -> dict | None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            header = json.loads(header_file.read_text())
            if header.items() >= stamp.items() and table_file.exists() and unpacked.exists():
                return header
        return None

    if header := current():
        return header
    with _lock(header_file.parent):
        if header := current():  # made by another process meanwhile
            return header
        fresh = Path(f"{unpacked}.fresh") if source.suffix == ".gz" else source
        if source.suffix == ".gz":
            _unpack(source, fresh)
        table, digest = index_tar(fresh, source)
        header = {**stamp, "digest": digest, "samples": len(table), "source": source.name}
        if promised not in (None, digest.encode()):
            if fresh != source:
                fresh.unlink()
            return header
        if fresh != source:
            os.replace(fresh, unpacked)
        _write_atomically(table_file, lambda out: np.save(out, table))
        _write_atomically(header_file, lambda out: out.write(json.dumps(header).encode()))
    return header


def _write_atomically(path: Path, write: Callable) -> None:
    """Replaces a file of the index by what `write(file)` writes; the caller holds the lock."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _unpack(source: Path, unpacked: Path) -> None:
    try:
        with gzip.open(source) as packed:
            _write_atomically(unpacked, lambda out: shutil.copyfileobj(packed, out, 1 << 20))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{source} is damaged: {error}") from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise FileNotFoundError(
            f"the index cannot be written to {folder} ({error.strerror}): set data.index=DIR"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
