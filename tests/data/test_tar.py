"""Damaged tars: index and stream report the byte, after all earlier members, and never loop."""

import gzip
import tarfile

import pytest

from lowprec.data.index import index_tar
from lowprec.data.stream import read_url
from tests.data.conftest import sample, write_tar


@pytest.fixture
def tar_and_offsets(tmp_path):
    """A tar of samples 0 .. 5, and the byte of each member's header."""
    members = [(f"{n}.{kind}", data) for n in range(6) for kind, data in sample(n).items()]
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path) as tar:
        return path, {member.name: member.offset for member in tar}


def read_until_error(url):
    """Names of the members that come, and the error that ends them."""
    names = []
    with pytest.raises((ValueError, OSError, tarfile.ReadError)) as raised:
        names += (name for name, _ in read_url(str(url)))
    return names, raised.value


def change(data, at, value):
    return data[:at] + value + data[at + len(value) :]


def header(kind, size, name="x.txt"):
    """A valid header of this kind; sizes below zero and above 8 GiB are stored in base 256."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def before(member, inserted):
    return lambda tar, at: tar[: at[member]] + inserted + tar[at[member] :]


def pax(text):
    """An extended header for the next member."""
    line = f"{len(text) + 5:03d} {text}\n".encode()
    return header(tarfile.XHDTYPE, len(line)) + line.ljust(512, b"\0")


DAMAGE = {  # how it is done; the first member that is not read; the key that the error names
    "bad header": (lambda tar, at: change(tar, at["3.png"], b"?"), ("3.png", "")),
    "size below zero": (before("3.txt", header(b"0", -512)), ("3.txt", "")),
    "size beyond 2 GiB": (before("3.txt", header(b"0", 2**31)), ("3.txt", "")),
    "long name of 1 GiB": (before("3.txt", header(b"L", 2**30)), ("3.txt", "")),
    "5,000 headers in a chain": (before("3.txt", header(b"L", 0) * 5000), ("3.txt", "")),
    "extended size -512": (before("3.txt", pax("size=-512")), ("3.txt", "")),
    "extended size no number": (before("3.txt", pax("size=many")), ("3.cls", "")),
    "cut in a header": (lambda tar, at: tar[: at["2.png"] + 99], ("2.png", "")),
    "cut in an image": (lambda tar, at: tar[: at["2.png"] + 600], ("2.png", "2.png")),
    "cut between samples": (lambda tar, at: tar[: at["2.png"]], ("2.png", "")),
    "zeros within": (lambda tar, at: change(tar, at["4.png"], bytes(512)), ("4.png", "")),
    "empty file": (lambda tar, at: b"", ("0.png", "")),
    "no member": (lambda tar, at: bytes(10240), ("0.png", "")),
    "gz cut short": (lambda tar, at: gzip.compress(tar[: at["2.png"]])[:-200], ("1.png", "1.png")),
    "gz damaged": (lambda tar, at: change(gzip.compress(tar), 10, b"\xff"), ("0.png", "")),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("spoil", "fault"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_an_error_after_all_earlier_members(tar_and_offsets, spoil, fault):
    path, at = tar_and_offsets
    path.write_bytes(spoil(path.read_bytes(), at))
    missing, key = fault
    names, error = read_until_error(path)
    assert names == list(at)[: list(at).index(missing)]
    assert str(error) and getattr(error, "key", "") == key
    fault = r"(is damaged: .*at byte \d|holds no whole sample)"
    if path.read_bytes().startswith(b"\x1f\x8b"):
        fault = "is compressed and has no offsets: gunzip it"
    with pytest.raises(ValueError, match=rf"a\.tar {fault}"):
        index_tar(str(path))


def test_only_regular_images_captions_and_labels_are_read(tmp_path, tar_and_offsets):
    path, at = tar_and_offsets
    with tarfile.open(path, "a") as tar:
        for name, kind in (("x.png", tarfile.SYMTYPE), ("x.txt", tarfile.DIRTYPE),
                           ("x.cls", tarfile.FIFOTYPE), ("x.pyd", tarfile.REGTYPE),
                           ("x.pickle", tarfile.REGTYPE),
                           ("txt", tarfile.REGTYPE)):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/hostname"
            tar.addfile(member)
    assert [name for name, _ in read_url(str(path))] == list(at)
    assert len(index_tar(str(path))[0]) == 6
