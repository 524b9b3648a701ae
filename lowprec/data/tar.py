"""What lies where in one tar of image-text samples, found without unpacking or trusting it."""

import hashlib
import os
import tarfile
from pathlib import Path

import numpy as np

IMAGES = ("jpg", "jpeg", "png", "webp")
MEMBERS = (*IMAGES, "txt", "json", "cls")
LARGEST = 2**31 - 1  # bytes of a member that the table can hold
SAMPLE = np.dtype(
    [
        ("image_offset", "<i8"),
        ("image_bytes", "<i4"),  # -1: the sample has no image; its offset is another member's
        ("text_offset", "<i8"),
        ("text_bytes", "<i4"),  # -1: the sample has no caption
        ("label", "<i4"),  # -1: none
    ]
)


def index_tar(path: Path, source: Path | None = None) -> tuple[np.ndarray, str]:
    """The SAMPLE table of an uncompressed tar and the digest of its members' names and bytes.

    A sample is a run of members with one key (the name up to the first dot of its last part), each
    kind once. One without an image or a caption (txt) has its row too, so that a reader can name
    it. Raises ValueError naming `source` for a damaged tar or one without a whole sample.
    """
    source = source or path
    digest = hashlib.sha256()
    rows: list[tuple] = []
    parts: dict[str, tuple[int, int]] = {}
    key = None
    try:
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size
            for member in tar:
                if member.size < 0:  # tarfile would go back, for ever
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
            f"{source} holds no whole sample: members KEY.txt and KEY.{'|'.join(IMAGES)} that "
            "follow each other"
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
        label = label_of(file.read(parts["cls"][1]))
    rows.append((*image, *parts.get("txt", (0, -1)), label))


def label_of(data: bytes) -> int:
    """The class in a .cls member; -1 where it is not a number of at most nine digits."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 10 else -1
