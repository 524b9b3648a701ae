"""Mutated tars, images and captions: each is read, a counted skip or an error, within seconds.

More cases than the suite runs: FUZZ_CASES=100000 FUZZ_SEED=1 pytest -m slow tests/data/test_fuzz.py
"""

import io
import os
import random
import signal
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lowprec.clip.text import Tokenizer
from lowprec.data.cache import DecodedCache
from lowprec.data.index import open_shards
from lowprec.data.loader import Batches
from lowprec.data.stream import read_url

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CASES, SEED = int(os.environ.get("FUZZ_CASES", 4200)), int(os.environ.get("FUZZ_SEED", 0))
DEADLINE_S = 20  # of one case
TOKENIZER = Tokenizer(77)
LETTERS = ["\0", " ", "\u0301", *"a é 中 ﷺ 👩 &amp; &#97; _ !? 7".split()]
KINDS = [tarfile.REGTYPE, b"\0", b"S", b"L", b"K", b"x", b"g", b"X", b"1", b"2", b"5", b"6", b"Z"]
SIZES = [0, 1, 511, 513, 2**16, 2**31, 2**33, 2**80, -1, -512, -(2**40)]


class Hang(BaseException):
    """A case took longer than its deadline."""


@pytest.fixture
def deadline():
    """A function: starts the time of the next case."""

    def end(*_):
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    yield lambda: signal.alarm(DEADLINE_S)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def mutate(dice: random.Random, data: bytes) -> bytes:
    """Some bits, bytes or stretches of the data changed, cut out, repeated or filled."""
    data = bytearray(data)
    for _ in range(dice.choice([1, 1, 1, 2, 5, 30])):
        at = dice.randrange(len(data) + 1)
        stretch = dice.choice([1, 1, 4, 64, 512, 5000])
        change = dice.randrange(6)
        if change == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif change == 1:
            data[at : at + stretch] = dice.randbytes(stretch)
        elif change == 2:
            del data[at : at + stretch]
        elif change == 3:
            data[at:at] = data[at : at + stretch] * dice.choice([1, 1, 40])
        elif change == 4:
            data[at : at + stretch] = bytes([dice.choice([0, 32, 48, 57, 255])]) * stretch
        else:
            del data[at : at + 1 if dice.random() < 0.8 else None]
    return bytes(data)


def an_image(dice: random.Random) -> bytes:
    """An image file of some kind, mode and size, two in three mutated."""
    mode = dice.choice(["RGB", "RGB", "L", "P", "1", "RGBA", "LA", "CMYK", "I;16"])
    size = dice.choice([1, 2, 7, 16, 33]), dice.choice([1, 5, 16, 40])
    kinds = {"CMYK": ["JPEG"], "RGB": ["JPEG", "PNG", "WEBP"], "L": ["JPEG", "PNG"]}
    kind, file = dice.choice(kinds.get(mode, ["PNG"])), io.BytesIO()
    noise = np.frombuffer(dice.randbytes(size[0] * size[1] * 3), np.uint8)
    image = Image.fromarray(noise.reshape(size[1], size[0], 3))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) << 8)
    (image if mode == "I;16" else image.convert(mode)).save(file, kind)
    return mutate(dice, file.getvalue()) if dice.random() < 0.67 else file.getvalue()


def a_caption(dice: random.Random) -> bytes:
    """Words of odd letters, one in three mutated, some very long."""
    count = dice.choice([0, 1, 20, 300, 3000, 60000])
    letters = dice.sample(LETTERS, dice.choice([1, 2, 6]))
    text = "".join(dice.choices(letters, k=count)).encode()
    return mutate(dice, text) if dice.random() < 0.33 else text


def a_header(dice: random.Random) -> bytes:
    """A valid tar header with an odd kind, size or name, and what may follow it."""
    name = dice.choice(["1.jpg", "x.txt", "a/b.cls", "", ".txt", "../1.png", "n" * 300 + ".jpg"])
    info = tarfile.TarInfo(name)
    info.size, info.type = dice.choice(SIZES), dice.choice(KINDS)
    head = info.tobuf(tarfile.GNU_FORMAT)
    line = dice.choice(["size=-512", "size=9" + "9" * 20, "GNU.sparse.major=1", "path=", "1" * 300])
    record = f"{len(line) + 5:03d} {line}\n".encode().ljust(512, b"\0")
    return head * dice.choice([1, 1, 1, 2000]) + dice.choice([b"", record, bytes(1024)])


def a_tar(dice: random.Random) -> bytes:
    """A tar of mutated samples, itself mutated in one of two cases."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dice.choice([0, 1, 2])) as tar:
        for number in range(dice.choice([1, 3, 6])):
            parts = {dice.choice(["jpg", "png", "webp"]): an_image(dice), "txt": a_caption(dice)}
            parts |= {"cls": dice.choice([b"3", b"-1", b"9" * 30, b"\xb2", b""])}
            for kind, data in dice.sample(list(parts.items()), dice.choice([2, 3, 3])):
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    tar = file.getvalue()
    if dice.random() < 0.3:
        at = dice.randrange(len(tar) // 512) * 512
        tar = tar[:at] + a_header(dice) + tar[at:]
    return mutate(dice, tar) if dice.random() < 0.3 else tar


def test_each_mutated_shard_is_read_skipped_or_refused(tmp_path, deadline):
    outcomes = {"refused": 0, "read": 0, "skipped": 0}
    path = tmp_path / "a.tar"
    for case in range(SEED * CASES, (SEED + 1) * CASES):
        path.write_bytes(a_tar(random.Random(case)))
        deadline()
        members, fault = [], None
        try:
            members += read_url(str(path))
        except (ValueError, OSError, tarfile.TarError) as error:
            fault = error
        try:
            shards = open_shards(str(path), accept=True)
        except ValueError as error:
            assert str(path) in str(error) and (fault or "no whole sample" in str(error)), case
            outcomes["refused"] += 1
            continue
        assert fault is None and members, case
        count = shards.num_samples
        batch = Batches(shards, None, count, 1, image_size=16, tokenizer=TOKENIZER)[0]
        assert len(batch.images) + len(batch.skips) == count, case
        assert all(skip["key"] and skip["reason"] for skip in batch.skips), case
        outcomes["read"] += len(batch.images)
        outcomes["skipped"] += len(batch.skips)
    assert all(outcomes.values()), outcomes


def exchange(dice: random.Random, files: list[Path], records: int) -> None:
    """Some bytes of cache files changed, or records or whole files moved."""
    path, other = dice.choice(files), dice.choice(files)
    size = path.stat().st_size // records
    content, source = bytearray(path.read_bytes()), other.read_bytes()
    to, at = dice.randrange(records) * size, dice.randrange(records) * size
    change = dice.randrange(4)
    if change == 0:
        content = bytearray(source)
    elif change == 1:
        content[to : to + size] = source[at : at + size]
    elif change == 2:
        shift = dice.choice([1, 4, size // 2])
        content[to : to + size] = source[at + shift : at + shift + size].ljust(size, b"\0")
    else:
        content = bytearray(mutate(dice, bytes(content)))
    path.write_bytes(content)


def test_no_exchange_of_cache_files_and_records_changes_a_batch(
    tmp_path, write_shards, sample, tokenize, deadline
):
    sets = []
    for first in (0, 50):
        change = {n: sample(first + n) for n in range(6)}
        sets.append(open_shards(write_shards(tmp_path / str(first), [6], change)))

    def batch_of(shards, cached):
        cache = DecodedCache(str(tmp_path), shards.digest, 6, 8, 1) if cached else None
        batch = Batches(shards, None, 6, 1, 8, tokenize, cache=cache)[0]
        return batch.images.tolist(), batch.tokens.tolist(), batch.labels.tolist()

    expected = [batch_of(shards, False) for shards in sets]
    for case in range(SEED * CASES, (SEED + 1) * CASES):
        deadline()
        assert [batch_of(shards, True) for shards in sets] == expected, case
        dice = random.Random(case)
        for _ in range(dice.choice([1, 1, 5])):
            exchange(dice, sorted(tmp_path.glob("*.decoded")), 6)
