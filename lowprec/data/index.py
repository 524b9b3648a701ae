"""Indexes webdataset shards: the position of each sample's bytes, and the digest of all bytes.

Each shard is indexed once. The index is a memory-mapped table of offsets and a JSON header for each
shard and one catalog for the pattern. Only images, captions and labels are read; nothing is
unpacked or unpickled, and no name becomes a path.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from lowprec.config.patterns import expand, some
from lowprec.data.shards import IMAGES, LARGEST, MEMBERS, SAMPLE, Shards, parse_label

FORMAT = 2  # of the index files
STAMP = ("path", "bytes", "mtime_ns")  # columns by which a catalog recognizes unchanged shards


def open_shards(
    pattern: str,
    index: str | None = None,
    *,
    name: str = "data.train",
    accept: bool = False,
    num_processes: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Shards:
    """Opens all shards of a pattern, after indexing new ones under a lock.

    The index lies in the folder `index`, or in `.index` beside each shard. An index is a promise:
    shards that are missing, changed or new since it was made are refused, unless `accept` takes
    them as the new set. `num_processes` above 1 needs a script with a `__main__` guard.
    `on_progress(done, total)` counts shards.

    Raises:
        FileNotFoundError: Nothing matches, or the folder is read-only and `index` is None.
        ValueError: Shards are damaged, empty or not those that were indexed; it names them.
    """
    sources = expand(pattern, name)
    homes: dict[str, tuple[str, str]] = {}
    absolute, bases = zip(*(_locate(source, homes, index) for source in sources), strict=True)
    catalog = np.empty(len(sources), dtype=_catalog_type(absolute))
    catalog["path"] = [path.encode() for path in absolute]
    for row, source in enumerate(sources):
        state = os.stat(source)
        catalog["bytes"][row], catalog["mtime_ns"][row] = state.st_size, state.st_mtime_ns
    file = Path(bases[0]).parent / f"catalog-{_short_digest(os.path.abspath(pattern))}.npy"
    recorded = _read_catalog(file)
    paths = [str(_unpacked(source, base)) for source, base in zip(sources, bases, strict=True)]
    current = recorded is not None and all(
        np.array_equal(recorded[key], catalog[key]) for key in STAMP
    )
    if current and all(os.path.exists(path) for path in set(paths) - set(sources)):
        catalog = recorded
    else:
        promised = _digests(recorded) if recorded is not None and not accept else {}
        _index_all(sources, bases, catalog, promised, num_processes, on_progress)
        if promised:
            _refuse_changes(promised, _digests(catalog), f"{name}={pattern}", pattern)
        with contextlib.suppress(OSError), _lock(file.parent):  # read-only: the next start looks
            _write_atomically(file, lambda out: np.save(out, catalog))
    digest = hashlib.sha256(b"".join(catalog["digest"].tolist())).hexdigest()
    tables = [f"{base}.npy" for base in bases]
    return Shards(paths, tables, catalog["samples"], digest, sources)


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


def _digests(catalog: np.ndarray) -> dict[bytes, bytes]:
    """Digests of a catalog's shards, by path."""
    return dict(zip(catalog["path"].tolist(), catalog["digest"].tolist(), strict=True))


def _locate(source: str, homes: dict[str, tuple[str, str]], index: str | None) -> tuple[str, str]:
    """Absolute path of a shard, and path of its index without a suffix; `homes` caches folders.

    The name of the index includes the shard's folder, so several sets may share an `index`.
    """
    folder, last = os.path.split(source)
    if folder not in homes:
        homes[folder] = os.path.abspath(folder), _short_digest(str(Path(folder).resolve()))[:8]
    absolute, place = homes[folder]
    base = os.path.join(index or os.path.join(folder, ".index"), f"{last}-{place}")
    return os.path.join(absolute, last), base


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unpacked(source: str, base: str) -> Path:
    """The uncompressed tar of a shard: the shard itself, or a file beside its index."""
    return Path(f"{base}.tar" if source.endswith(".gz") else source)


def _index_all(
    sources: list[str],
    bases: Sequence[str],
    catalog: np.ndarray,
    promised: dict[bytes, bytes],
    num_processes: int,
    on_progress: Callable[[int, int], None] | None,
) -> None:
    """Fills in samples and digest of each shard; a ValueError names all unreadable shards.

    `promised`: digest by path. Index files with another digest are left as they are.
    """
    paths = catalog["path"].tolist()
    jobs = [(s, b, promised.get(p)) for s, b, p in zip(sources, bases, paths, strict=True)]
    folders = {Path(b).parent for s, b, _ in jobs if _read_header(s, b) is None}
    faults = []
    with contextlib.ExitStack() as stack:
        for folder in sorted(folders):
            stack.enter_context(_lock(folder))
        results = map(_index_shard, jobs)
        if folders and num_processes > 1:
            spawn = get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(num_processes, mp_context=spawn))
            results = pool.map(_index_shard, jobs)
        for row, header in enumerate(results):
            if isinstance(header, str):
                faults.append(header)
            else:
                catalog["samples"][row], catalog["digest"][row] = (
                    header["samples"],
                    header["digest"],
                )
            if on_progress:
                on_progress(row + 1, len(sources))
    if faults:
        raise ValueError(some(faults, "; "))


def _refuse_changes(
    before: dict[bytes, bytes], now: dict[bytes, bytes], name: str, pattern: str
) -> None:
    """Raises a ValueError naming each shard that is missing, changed or new since then."""
    differences = {
        "missing": [path for path in before if path not in now],
        "changed": [path for path in before if path in now and before[path] != now[path]],
        "new": [path for path in now if path not in before],
    }
    parts = [
        f"{len(paths)} {kind} ({some([path.decode() for path in paths], ', ')})"
        for kind, paths in differences.items()
        if paths
    ]
    if parts:
        raise ValueError(
            f"{name}: the shards differ from the indexed ones: {'; '.join(parts)}. A run on them "
            "would be another run. To accept them: "
            f"python -m experiments.index_shards shards='{pattern}'"
        )


def _stamp(source: str) -> dict:
    state = os.stat(source)
    return {"format": FORMAT, "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}


def _read_header(source: str, base: str) -> dict | None:
    """The header of a shard's index; None if the index is missing, damaged or out of date."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        header = json.loads(Path(f"{base}.json").read_text())
        complete = os.path.exists(f"{base}.npy") and _unpacked(source, base).exists()
        if complete and header.items() >= _stamp(source).items():
            return header
    return None


def _index_shard(job: tuple[str, str, bytes | None]) -> dict | str:
    """The header of a shard's index, rebuilt if it is out of date, or the fault of the shard.

    If the digest is not the promised one, the files stay unchanged: the shard may be restored.
    """
    source, base, promised = job
    if header := _read_header(source, base):  # perhaps made by another process meanwhile
        return header
    stamp, unpacked = _stamp(source), _unpacked(source, base)
    packed = source.endswith(".gz")
    fresh = Path(f"{unpacked}.fresh") if packed else Path(source)
    try:
        if packed:
            _unpack(source, fresh)
        table, digest = index_tar(fresh, source)
    except ValueError as error:
        return str(error)
    header = {**stamp, "digest": digest, "samples": len(table), "source": os.path.basename(source)}
    if promised not in (None, digest.encode()):
        if packed:
            fresh.unlink()
        return header
    if packed:
        os.replace(fresh, unpacked)
    _write_atomically(Path(f"{base}.npy"), lambda out: np.save(out, table))
    _write_atomically(Path(f"{base}.json"), lambda out: out.write(json.dumps(header).encode()))
    return header


def _write_atomically(path: Path, write: Callable) -> None:
    """Replaces a file of the index with what `write(file)` writes; the caller holds the lock."""
    temporary = f"{path}.tmp"
    with open(temporary, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _unpack(source: str, unpacked: Path) -> None:
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


def index_tar(path: Path, source: str | None = None) -> tuple[np.ndarray, str]:
    """The `SAMPLE` table of an uncompressed tar, and the digest of its members' names and bytes.

    A sample is a run of members with one key (the name up to the first dot of its last component),
    each kind once. Samples without an image or a caption have a row too, so that a reader can name
    them. Raises ValueError naming `source` if the tar is damaged or holds no whole sample.
    """
    source = source or str(path)
    digest = hashlib.sha256()
    rows: list[tuple] = []
    parts: dict[str, tuple[int, int]] = {}
    key = None
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            for member in tar:
                if member.size < 0:  # tarfile would loop forever
                    raise tarfile.ReadError(f"a size below zero at byte {member.offset}")
                stem, dot, kind = _split(member.name)
                if not member.isfile() or member.issparse() or not dot or kind not in MEMBERS:
                    continue
                if stem != key or kind in parts:
                    _close_sample(parts, rows, file)
                    key, parts = stem, {}
                if member.size > min(end - member.offset_data, LARGEST):
                    raise tarfile.ReadError(f"a size of {member.size} at byte {member.offset}")
                file.seek(member.offset_data)
                data = file.read(member.size)
                name = f"{stem}.{kind} {member.size}\n"
                digest.update(name.encode("utf-8", "surrogateescape") + data)
                parts[kind] = (member.offset_data, member.size)
            _close_sample(parts, rows, file)
            file.seek(tar.offset)
            last = file.read(512)  # tarfile ends silently at a bad, zero or missing header
            rest = iter(lambda: file.read(1 << 20), b"")
            if last != bytes(512) or any(chunk.strip(b"\0") for chunk in rest):
                raise tarfile.ReadError(f"bad header or early end at byte {tar.offset}")
    except (tarfile.TarError, ValueError, LookupError) as error:  # the last two: a pax header
        raise ValueError(f"{source} is damaged: {error}") from error
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    table = np.array(rows, dtype=SAMPLE)
    if not ((table["image_bytes"] >= 0) & (table["text_bytes"] >= 0)).any():
        raise ValueError(
            f"{source} holds no whole sample: adjacent members KEY.txt and KEY.{'|'.join(IMAGES)}"
        )
    return table, digest.hexdigest()


def _split(name: str) -> tuple[str, str, str]:
    folder, _, last = name.rpartition("/")
    stem, dot, kind = last.partition(".")
    return f"{folder}/{stem}", dot, kind.lower()


def _close_sample(parts: dict[str, tuple[int, int]], rows: list[tuple], file: object) -> None:
    if not parts:
        return
    anywhere = next(iter(parts.values()))[0]
    image = next((parts[kind] for kind in IMAGES if kind in parts), (anywhere, -1))
    label = -1
    if "cls" in parts:
        file.seek(parts["cls"][0])
        label = parse_label(file.read(parts["cls"][1]))
    rows.append((*image, *parts.get("txt", (0, -1)), label))
