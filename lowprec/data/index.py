"""The index of a set of webdataset shards: where each sample's bytes lie, and their digest.

Made once for each shard and kept as two small files, a memory-mapped table of offsets and a JSON
header. Members other than images, captions and labels are never read; nothing is ever unpickled.
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
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from braceexpand import UnbalancedBracesError, braceexpand

IMAGES = ("jpg", "jpeg", "png", "webp")
MEMBERS = (*IMAGES, "txt", "json", "cls")
FORMAT = 1
SAMPLE = np.dtype(
    [
        ("image_offset", "<i8"),
        ("image_bytes", "<i4"),
        ("text_offset", "<i8"),
        ("text_bytes", "<i4"),
        ("label", "<i4"),  # -1: none
    ]
)


def expand(pattern: str, name: str = "data.train") -> list[Path]:
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
        return [Path(path) for path in sorted({path for part in found.values() for path in part})]
    folder = Path(pattern).parent
    while not glob.glob(str(folder)) and folder != folder.parent:
        folder = folder.parent
    here = [str(path) for path in sorted(folder.glob("*"))[:1000]]
    near = difflib.get_close_matches(pattern, here, n=1, cutoff=0)
    hint = f"; nearest: {near[0]}" if near else f"; {folder} is empty"
    raise FileNotFoundError(f"{name}={pattern}: no file matches{hint}")


@dataclass(frozen=True)
class Shards:
    """Indexed shards, read by offset.

    `paths`: uncompressed tars; `tables`: a SAMPLE array each; `starts`: int64 [shards + 1], global
    number of each shard's first sample; `digest`: of all members' bytes, whatever their container.
    """

    paths: list[Path]
    tables: list[np.ndarray]
    starts: np.ndarray
    digest: str

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return int(self.starts[-1])

    @property
    def counts(self) -> np.ndarray:
        """Samples of each shard, int64 [shards]."""
        return np.diff(self.starts)

    def locate(self, sample: int) -> tuple[int, np.void]:
        """Shard number and table row of a global sample number."""
        shard = int(np.searchsorted(self.starts, sample, side="right")) - 1
        return shard, self.tables[shard][sample - self.starts[shard]]

    @property
    def labels(self) -> np.ndarray:
        """int64 [samples]; -1 where a sample has no label."""
        return np.concatenate([table["label"] for table in self.tables]).astype(np.int64)


def open_shards(
    pattern: str,
    index: str | None = None,
    *,
    name: str = "data.train",
    on_progress: Callable[[int, int], None] | None = None,
) -> Shards:
    """Indexes what is not indexed yet (under a lock) and opens all shards of a pattern.

    The index lies in `index`, or in a folder `.index` beside each shard. `on_progress(done, total)`
    counts shards. Raises FileNotFoundError (no match, or a read-only folder and no `index`) and
    ValueError (a damaged or empty shard, named).
    """
    sources = expand(pattern, name)
    headers, paths, tables = [], [], []
    for done, source in enumerate(sources, 1):
        folder = Path(index) if index else source.parent / ".index"
        header, path, table = _open_shard(source, folder)
        headers.append(header)
        paths.append(path)
        tables.append(np.load(table, mmap_mode="r"))
        if on_progress:
            on_progress(done, len(sources))
    starts = np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
    whole = hashlib.sha256("".join(header["digest"] for header in headers).encode()).hexdigest()
    return Shards(paths, tables, starts, whole)


def _open_shard(source: Path, folder: Path) -> tuple[dict, Path, Path]:
    """Header, uncompressed tar and table file of one shard, made if missing or out of date."""
    place = hashlib.sha256(str(source.parent.resolve()).encode()).hexdigest()[:8]
    base = folder / f"{source.name}-{place}"
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
        return header, unpacked, table_file
    with _lock(folder):
        if header := current():  # made by another process meanwhile
            return header, unpacked, table_file
        if source.suffix == ".gz":
            _unpack(source, unpacked)
        table, digest = index_tar(unpacked, source)
        with open(f"{table_file}.tmp", "wb") as file:
            np.save(file, table)
        os.replace(f"{table_file}.tmp", table_file)
        header = {**stamp, "digest": digest, "samples": len(table), "source": source.name}
        Path(f"{header_file}.tmp").write_text(json.dumps(header))
        os.replace(f"{header_file}.tmp", header_file)
    return header, unpacked, table_file


def _unpack(source: Path, unpacked: Path) -> None:
    try:
        with gzip.open(source) as packed, open(f"{unpacked}.tmp", "wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{source} is damaged: {error}") from error
    os.replace(f"{unpacked}.tmp", unpacked)


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


def index_tar(path: Path, source: Path | None = None) -> tuple[np.ndarray, str]:
    """The SAMPLE table of an uncompressed tar and the digest of its members' names and bytes.

    A sample is a run of members with one key (the name up to the first dot of its last part); it
    needs an image and a caption (txt). Raises ValueError naming `source` for a damaged tar or one
    without a whole sample.
    """
    source = source or path
    digest = hashlib.sha256()
    rows: list[tuple] = []
    parts: dict[str, tuple[int, int]] = {}
    key = None
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            for member in tar:
                stem, dot, kind = _split(member.name)
                if not member.isfile() or not dot or kind not in MEMBERS:
                    continue
                if stem != key:
                    _close_sample(parts, rows, file)
                    key, parts = stem, {}
                file.seek(member.offset_data)
                data = file.read(member.size)
                if len(data) < member.size:
                    raise tarfile.ReadError("the last member is cut short")
                digest.update(f"{stem}.{kind} {member.size}\n".encode() + data)
                parts[kind] = (member.offset_data, member.size)
            _close_sample(parts, rows, file)
            file.seek(tar.offset)
            end = file.read(512)  # tarfile ends silently at a bad, zero or missing header
            rest = iter(lambda: file.read(1 << 20), b"")
            if end != bytes(512) or any(chunk.strip(b"\0") for chunk in rest):
                raise tarfile.ReadError(f"bad header or early end at byte {tar.offset}")
    except tarfile.TarError as error:
        raise ValueError(f"{source} is damaged: {error}") from error
    if not rows:
        raise ValueError(f"{source} holds no sample: a sample is an image ({IMAGES}) and a .txt")
    return np.array(rows, dtype=SAMPLE), digest.hexdigest()


def _split(name: str) -> tuple[str, str, str]:
    folder, _, last = name.rpartition("/")
    stem, dot, kind = last.partition(".")
    return f"{folder}/{stem}", dot, kind.lower()


def _close_sample(parts: dict[str, tuple[int, int]], rows: list[tuple], file: object) -> None:
    image = next((parts[kind] for kind in IMAGES if kind in parts), None)
    if image is None or "txt" not in parts:
        return
    label = -1
    if "cls" in parts:
        file.seek(parts["cls"][0])
        text = file.read(parts["cls"][1]).strip()
        label = int(text) if text.isdigit() and len(text) < 10 else -1
    rows.append((*image, *parts["txt"], label))
