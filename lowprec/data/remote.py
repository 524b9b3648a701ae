"""The members of a tar behind a URL, read as it comes: nothing is cached, damage is an error."""

import contextlib
import os
import signal
import tarfile
from collections.abc import Iterator
from urllib.parse import urlsplit

from webdataset.gopen import Pipe, gopen
from webdataset.tariterators import base_plus_ext

from lowprec.data.tar import LARGEST, MEMBERS

CURL = {6: "no such host", 7: "cannot connect", 22: "an HTTP error, such as 404", 28: "timed out"}
STOPPING = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR2}


class DamagedError(ValueError):
    """A tar is cut short or damaged in the member `key`, "" between two."""

    def __init__(self, message: str, key: str = ""):
        super().__init__(message)
        self.key = key


def read_members(url: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each image, caption and label; other members are passed over unread.

    The tar may be packed (gz, bz2, xz). Raises whatever a server, a command or damaged bytes make
    go wrong, after all members before it; DamagedError where the place is known.
    """
    found = False
    with (
        contextlib.closing(_Source(url)) as source,
        tarfile.open(fileobj=source, mode="r|*", tarinfo=_StrictHeader) as tar,
    ):
        while (member := tar.next()) is not None:
            tar.members = []  # or the headers of the whole shard are kept
            if not 0 <= member.size <= LARGEST:
                raise DamagedError(f"a size of {member.size} at byte {member.offset}")
            stem, kind = base_plus_ext(member.name)
            plain = member.isfile() and not member.issparse()
            if plain and stem is not None and kind.lower() in MEMBERS:
                found = True
                try:
                    data = tar.extractfile(member).read()
                except tarfile.ReadError as error:
                    place = f"in the member at byte {member.offset}"
                    raise DamagedError(f"{error} {place}", member.name) from None
                yield member.name, data
        rest = iter(lambda: tar.fileobj.read(1 << 16), b"")
        if any(chunk.strip(b"\0") for chunk in rest):
            raise DamagedError(f"early end at byte {tar.offset}")
    if not found:
        raise DamagedError("no image, caption or label in it")


class _StrictHeader(tarfile.TarInfo):
    """tarfile takes a damaged header for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except (
            tarfile.InvalidHeaderError,
            tarfile.EmptyHeaderError,
            tarfile.TruncatedHeaderError,
        ) as error:
            raise DamagedError(f"bad header at byte {tar.offset}: {error}") from None


class _Source:
    """What webdataset opens for a URL. Its end is an error if the command behind it has failed.

    webdataset asks after each read whether the command has failed, so that how much is read before
    the error is a matter of time. Here all that came is read first.
    """

    def __init__(self, url: str):
        # A signal to the process group is not for curl: half a shard would be missing. A worker
        # ignores signals, and its commands with it; this is for num_workers=0.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            self.opened = gopen(url if urlsplit(url).scheme else os.path.abspath(url))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        piped = isinstance(self.opened, Pipe)  # kept: it closes its stream when it is let go
        self.command = self.opened.proc if piped else None
        self.file = self.opened.stream if piped else self.opened

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        if not data and self.command and self.command.wait():
            shell = isinstance(self.command.args, str)  # and may hold secrets
            program = "the command" if shell else self.command.args[0]
            status = self.command.returncode
            hint = f" ({CURL[status]})" if program == "curl" and status in CURL else ""
            raise OSError(f"{program} failed with status {status}{hint}")
        return data

    def close(self) -> None:
        if self.command:
            self.command.kill()
        self.file.close()
        if self.command:
            self.command.wait()
