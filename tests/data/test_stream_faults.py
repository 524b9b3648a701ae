"""What a stream cannot read: named in its skips, never decoded, never an endless loop."""

import os
import pickle
import tarfile
from pathlib import Path

import pytest
import torch

from lowprec.config.patterns import ShardUrls
from lowprec.data.shards import ShardError
from lowprec.data.stream import Stream


@pytest.fixture
def put(tmp_path, sample, write_tar):
    """A function: a shard of numbered samples, some changed; returns its path."""

    def put(name, numbers, change=None):
        members = []
        for number in numbers:
            parts = {**sample(number), **(change or {}).get(number, {})}
            members += [(f"{number:06d}.{k}", v) for k, v in parts.items() if v is not None]
        return str(write_tar(tmp_path / name, members))

    return put


def tokenize(captions):
    return torch.tensor([[int(caption.split()[-1])] for caption in captions])


def read(urls, *, num_steps=4, batch_size=1):
    stream = Stream(
        ShardUrls(urls), seed=0, batch_size=batch_size, num_steps=num_steps, segment_steps=99,
        workers=0, image_size=12, tokenizer=tokenize,
    )  # fmt: skip
    return list(stream.batches_from(1))


def numbers(batches):
    return [number for batch in batches for number in batch.tokens[:, 0].tolist()]


SPOILED = {  # how a tar of samples 0 .. 5 is spoiled, its third image being at a byte: the rows
    "bad header": (
        lambda tar, at: tar[:at] + b"?" + tar[at + 1 :],
        [("", "DamagedError: bad header at byte {}: bad checksum")],
    ),
    "bad header after an image": (
        lambda tar, at: tar[: at + 1536] + b"?" + tar[at + 1537 :],
        [("", "DamagedError: bad header at byte"), ("000002", "ValueError: no caption (txt)")],
    ),
    "cut short": (
        lambda tar, at: tar[: at + 600],
        [("000002.png", "DamagedError: unexpected end of data in the member at byte {}")],
    ),
}


@pytest.mark.parametrize(("spoil", "rows"), SPOILED.values(), ids=SPOILED.keys())
def test_damaged_shard_is_named_and_the_rest_still_comes(put, spoil, rows):
    good, bad = put("good.tar", range(10, 16)), put("bad.tar", range(6))
    with tarfile.open(bad) as tar:
        third = tar.getmember("000002.png").offset
    Path(bad).write_bytes(spoil(Path(bad).read_bytes(), third))
    # The row of a shard that ends the pass comes with the first sample of the next.
    batches = read([good, bad], num_steps=9)
    assert sorted(numbers(batches)[:-1]) == [0, 1, *range(10, 16)]
    found = {(s["shard"], s["key"], s["reason"]) for batch in batches for s in batch.skips}
    assert len(found) == len(rows)
    for key, reason in rows:
        start = reason.format(third)
        assert any(row[:2] == (bad, key) and row[2].startswith(start) for row in found), found


FAULTS = {  # members that replace those of sample 3: the reason
    "broken image": ({"png": b"not an image"}, "not a JPEG, WEBP or PNG image"),
    "empty image": ({"png": b""}, "not a JPEG"),
    "no image": ({"png": None}, "no image (jpg, jpeg, png, webp) beside it"),
    "no caption": ({"txt": None}, "no caption (txt) beside it"),
    "blank caption": ({"txt": b" \n"}, "the caption is empty"),
    "no UTF-8": ({"txt": b"caption \xff 3"}, "UnicodeDecodeError"),
}


@pytest.mark.parametrize(("change", "reason"), FAULTS.values(), ids=FAULTS.keys())
def test_bad_sample_is_named_and_the_next_takes_its_place(put, change, reason):
    url = put("a.tar", range(6), {3: change})
    batches = read([url], batch_size=2, num_steps=3)
    assert sorted(numbers(batches)[:5]) == [0, 1, 2, 4, 5] and len(numbers(batches)) == 6
    skips = [skip for batch in batches for skip in batch.skips]
    assert {(skip["shard"], skip["key"]) for skip in skips} == {(url, "000003")}
    assert reason in skips[0]["reason"]
    met = next(i for i, batch in enumerate(batches) if batch.skips)
    assert batches[met].skips[0]["position"] == 2 * met


def test_second_member_of_a_kind_is_named_and_the_first_taken(tmp_path, write_tar, sample):
    a, b = sample(0), sample(1)
    members = [("x.png", a["png"]), ("x.txt", a["txt"]), ("x.PNG", b["png"]), ("x.txt", b["txt"])]
    (batch,) = read([str(write_tar(tmp_path / "a.tar", members))], num_steps=1)
    assert numbers([batch]) == [0]
    assert [skip["key"] for skip in batch.skips] == ["x.PNG", "x.txt"]
    assert "two of this kind" in batch.skips[0]["reason"]


def test_same_key_in_two_shards_is_two_samples(put):
    urls = [put("a.tar", [0], {0: {"txt": None}}), put("b.tar", [0], {0: {"png": None}})]
    with pytest.raises(ShardError, match="beside it"):
        read(urls)


def test_a_pass_without_a_good_sample_is_an_error_and_not_an_endless_loop(tmp_path, put):
    bad = put("bad.tar", range(6), {n: {"txt": b""} for n in range(6)})
    with pytest.raises(ShardError, match="no readable sample in a worker's 2 of 2 shards"):
        read([bad, str(tmp_path / "gone.tar")])
    once = f"pipe:cat {put('a.tar', range(4))} && rm {tmp_path}/a.tar"
    assert len(read([once], num_steps=4)) == 4
    put("a.tar", range(4))
    with pytest.raises(ShardError, match="a.tar .*: OSError: the command failed with status 1"):
        read([once], num_steps=5)


def test_first_fault_is_in_the_message(put):
    url = put("a.tar", range(2), {0: {"txt": b""}, 1: {"txt": b""}})
    with pytest.raises(ShardError, match=f"{url} 00000[01]: ValueError: the caption is empty"):
        read([url])


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.open, (str(self.path), os.O_CREAT)


def test_pickled_members_are_never_decoded(tmp_path, put):
    payload = pickle.dumps(Canary(tmp_path / "executed"))
    kinds = ("pyd", "pickle", "pkl", "pth", "pt", "npy", "ten", "mp", "json")
    url = put("a.tar", range(8), {n: dict.fromkeys(kinds, payload) for n in range(8)})
    assert sorted(numbers(read([url], num_steps=8))) == list(range(8))
    assert not (tmp_path / "executed").exists()
    os.close(pickle.loads(payload))
    assert (tmp_path / "executed").exists()
