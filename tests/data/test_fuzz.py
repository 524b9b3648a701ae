"""Mutated tars, images and captions: each is read, a counted skip or an error, within seconds.

More cases than the suite runs: FUZZ_CASES=100000 FUZZ_SEED=1 pytest -m slow tests/data/test_fuzz.py
"""

import io
import os
import random
import signal
import tarfile

import pytest

from lowprec.clip.text import Tokenizer
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


def a_header(dice: random.Random) -> bytes:
    """A valid tar header with an odd kind, size or name, and what may follow it."""
    name = dice.choice(["1.jpg", "x.txt", "a/b.cls", "", ".txt", "../1.png", "n" * 300 + ".jpg"])
    info = tarfile.TarInfo(name)
    info.size, info.type = dice.choice(SIZES), dice.choice(KINDS)
    head = info.tobuf(tarfile.GNU_FORMAT)
    line = dice.choice(["size=-512", "size=9" + "9" * 20, "GNU.sparse.major=1", "path=", "1" * 300])
    record = f"{len(line) + 5:03d} {line}\n".encode().ljust(512, b"\0")
    return head * dice.choice([1, 1, 1, 2000]) + dice.choice([b"", record, bytes(1024)])


def a_tar(dice: random.Random, sample) -> bytes:
    """A tar of samples with some members mutated, itself mutated in one of three cases."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dice.choice([0, 1, 2])) as tar:
        for number in range(dice.choice([1, 3, 6])):
            parts = sample(number) | {"cls": dice.choice([b"3", b"-1", b"9" * 30, b"\xb2", b""])}
            parts["txt"] = "".join(dice.choices(LETTERS, k=dice.choice([0, 20, 3000]))).encode()
            for kind, data in dice.sample(list(parts.items()), dice.choice([2, 3, 3])):
                data = mutate(dice, data) if dice.random() < 0.5 else data
                info = tarfile.TarInfo(f"{number}.{kind}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    tar = file.getvalue()
    if dice.random() < 0.3:
        at = dice.randrange(len(tar) // 512) * 512
        tar = tar[:at] + a_header(dice) + tar[at:]
    return mutate(dice, tar) if dice.random() < 0.3 else tar


def test_each_mutated_shard_is_read_skipped_or_refused(tmp_path, sample):
    outcomes = {"refused": 0, "read": 0, "skipped": 0}
    path = tmp_path / "a.tar"
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # raises KeyboardInterrupt
    for case in range(SEED * CASES, (SEED + 1) * CASES):
        path.write_bytes(a_tar(random.Random(case), sample))
        signal.alarm(DEADLINE_S)
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
    signal.alarm(0)
    assert all(outcomes.values()), outcomes
