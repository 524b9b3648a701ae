"""Strict reading of image-text tars: damage is an error that names the byte, never an early end."""

import tarfile
from collections.abc import Iterator

IMAGES = ("jpg", "jpeg", "png", "webp")
MEMBERS = (*IMAGES, "txt", "json", "cls")  # the only kinds of members that are read
LARGEST = 2**31 - 1  # bytes of a member that an index can hold
EXTENSIONS = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"x", b"g", b"X")
LARGEST_EXTENSION = 2**15  # bytes of a header extension; parsing takes quadratic time


class DamagedError(ValueError):
    """A tar is truncated or damaged, in the member `key` or, if that is "", between two."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


class LostPairsError(ValueError):
    """Pairs have more dots in their names than one, so that no reader would find them."""


class StrictHeader(tarfile.TarInfo):
    """Raises DamagedError for a header with which tarfile would end early, loop or fail."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> tarfile.TarInfo:
        """A header, whose size is checked before anything is read by it."""
        header = super().frombuf(buf, encoding, errors)
        most = LARGEST_EXTENSION if header.type in EXTENSIONS else LARGEST
        if not 0 <= header.size <= most:
            raise tarfile.InvalidHeaderError(f"a size of {header.size}")
        return header

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """The next header; calls itself for one that extends the next."""
        start = tar.offset
        try:
            return super().fromtarfile(tar)
        except (tarfile.EOFHeaderError, DamagedError):
            raise
        except (tarfile.HeaderError, ValueError, LookupError, RecursionError) as error:
            raise DamagedError(f"bad header at byte {start}: {error}") from None


def read_members(
    tar: tarfile.TarFile, limits: dict[str, int] | None = None
) -> Iterator[tuple[tarfile.TarInfo, str, str, bytes]]:
    """Header, key, kind and bytes of each image, caption and label in a tar, to its end.

    The key is the name up to the first dot of its last component. `limits`: by kind, the bytes
    after which the rest of a member is left out. `tar` is opened with `tarinfo=StrictHeader`.
    Raises DamagedError after all members before the damage, LostPairsError after the last member.
    """
    keys, others = set(), []
    while (member := tar.next()) is not None:
        tar.members = []  # else it keeps the headers of the whole shard
        if not 0 <= member.size <= LARGEST or tar.offset <= member.offset:  # as a later header says
            raise DamagedError(f"a size of {member.size} at byte {member.offset}")
        folder, _, last = member.name.rpartition("/")
        stem, dot, kind = last.partition(".")
        if member.isfile() and not member.issparse() and dot and kind.lower() in MEMBERS:
            try:
                data = tar.extractfile(member).read((limits or {}).get(kind.lower()))
            except tarfile.ReadError as error:
                place = f"in the member at byte {member.offset}"
                raise DamagedError(f"{error} {place}", member.name) from None
            keys.add(f"{folder}/{stem}")
            yield member, f"{folder}/{stem}", kind.lower(), data
        elif member.isfile() and stem and "." in kind:
            others.append(member.name)
    rest = iter(lambda: tar.fileobj.read(1 << 16), b"")
    if any(chunk.strip(b"\0") for chunk in rest):
        raise DamagedError(f"early end at byte {tar.offset}")
    if lost := _lost_pairs(others, keys):
        raise LostPairsError(
            f"pairs such as {ascii(lost[0])} ({len(lost)} in all) would be lost, because a key "
            "ends at the first dot of a name: replace the other dots"
        )


def _lost_pairs(names: list[str], keys: set[str]) -> list[str]:
    """Names without extension of an image and a text that are not fields of another sample."""
    split = [name.rpartition(".") for name in names]
    described = {stem for stem, _, kind in split if kind.lower() in ("txt", "cls")}
    pairs = {stem for stem, _, kind in split if kind.lower() in IMAGES} & described
    return sorted(pair for pair in pairs if _key_of(pair) not in keys)


def _key_of(name: str) -> str:
    """The key as `read_members` forms it."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}"


def parse_label(data: bytes) -> int:
    """The class in a .cls member; -1 unless it is a number with at most nine digits."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) < 10 else -1
