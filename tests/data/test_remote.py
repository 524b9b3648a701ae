"""Reading a tar as it comes: every kind of damage is an error that says where."""

import gzip
import signal
import tarfile

import pytest

from lowprec.data.stream import _Source, read_members


@pytest.fixture
def shard(tmp_path, sample, write_tar):
    """A tar of samples 0 .. 5, and the byte of each member's header."""
    members = [(f"{n}.{kind}", data) for n in range(6) for kind, data in sample(n).items()]
    path = write_tar(tmp_path / "a.tar", members)
    with tarfile.open(path) as tar:
        return path, {member.name: member.offset for member in tar}


def read_until_error(url):
    """Names of the members that come, and the error that ends them."""
    names = []
    with pytest.raises((ValueError, OSError, tarfile.ReadError)) as raised:
        names += (name for name, _ in read_members(str(url)))
    return names, raised.value


def change(data, at, value):
    return data[:at] + value + data[at + len(value) :]


def with_size(tar, at, size):
    """The header at a byte with another size and a checksum that is right."""
    header = bytearray(tar[at : at + 512])
    header[124:136] = size
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return change(tar, at, bytes(header))


DAMAGE = {  # how it is done; the first member that does not come; key and message
    "bad header": (
        lambda tar, at: change(tar, at["3.png"], b"?"),
        ("3.png", "", "bad header at byte {}: bad checksum"),
    ),
    "size below zero": (
        lambda tar, at: with_size(tar, at["3.txt"], b"\xff" * 12),
        # which of the two is said depends on the version of tarfile
        ("3.txt", "", "a size of -1 at byte {0} | bad header at byte {0}: invalid offset"),
    ),
    "size beyond 2 GiB": (
        lambda tar, at: with_size(tar, at["3.txt"], b"%011o\0" % 2**31),
        ("3.txt", "", "a size of 2147483648 at byte {}"),
    ),
    "cut in a header": (
        lambda tar, at: tar[: at["2.png"] + 99],
        ("2.png", "", "bad header at byte {}: truncated header"),
    ),
    "cut in an image": (
        lambda tar, at: tar[: at["2.png"] + 600],
        ("2.png", "2.png", "unexpected end of data in the member at byte {}"),
    ),
    "cut between samples": (
        lambda tar, at: tar[: at["2.png"]],
        ("2.png", "", "bad header at byte {}: empty header"),
    ),
    "zeros within": (
        lambda tar, at: change(tar, at["4.png"], bytes(512)),
        ("4.png", "", "early end at byte {}"),
    ),
    "empty file": (lambda tar, at: b"", ("0.png", "", "bad header at byte {}: empty header")),
    "a web page": (
        lambda tar, at: b"<html>" * 500,
        ("0.png", "", "bad header at byte {}: invalid header"),
    ),
    "no member": (lambda tar, at: bytes(10240), ("0.png", "", "no image, caption or label in it")),
    "gz cut short": (
        lambda tar, at: gzip.compress(tar[: at["2.png"]])[:-200],
        ("1.png", "1.png", "unexpected end of data in the member at byte {}"),
    ),
    "gz damaged": (
        lambda tar, at: change(gzip.compress(tar), 10, b"\xff"),
        ("0.png", "", "invalid compressed data"),
    ),
}


@pytest.mark.parametrize(("spoil", "fault"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_an_error_after_all_members_before_it(shard, spoil, fault):
    path, at = shard
    path.write_bytes(spoil(path.read_bytes(), at))
    missing, key, message = fault
    names, error = read_until_error(path)
    assert names == list(at)[: list(at).index(missing)]
    messages = [text.format(at[missing]) for text in message.split(" | ")]
    assert str(error) in messages and getattr(error, "key", "") == key


def test_only_plain_images_captions_and_labels_come(tmp_path, shard):
    path, at = shard
    with tarfile.open(path, "a") as tar:
        for name, kind in (("x.png", tarfile.SYMTYPE), ("x.txt", tarfile.DIRTYPE),
                           ("x.cls", tarfile.FIFOTYPE), ("x.pyd", tarfile.REGTYPE),
                           (".txt", tarfile.REGTYPE), ("txt", tarfile.REGTYPE)):  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/hostname"
            tar.addfile(member)
    assert [name for name, _ in read_members(str(path))] == list(at)


def test_failure_of_a_command_comes_after_all_that_it_wrote(shard):
    path, at = shard
    names, error = read_until_error(f"pipe:cat {path}; exit 3")
    assert names == list(at) and str(error) == "the command failed with status 3"
    source = _Source("pipe:echo all; exit 3")
    source.command.wait()  # so that the failure is known before the first read
    assert source.read(100) == b"all\n"
    with pytest.raises(OSError, match="status 3"):
        source.read(100)
    source.close()


def test_a_command_ends_with_its_reader():
    source = _Source("pipe:yes")
    assert source.read(2) == b"y\n"
    source.close()
    assert source.command.returncode == -signal.SIGKILL
