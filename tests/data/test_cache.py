"""The cache of decoded pairs: the same batches as without it, whatever happens to its file."""

import os
import shutil
import tarfile

import numpy as np
import pytest

from lowprec.config.check import ConfigError
from lowprec.data import loader
from lowprec.data.cache import DecodedCache
from lowprec.data.index import open_shards
from lowprec.data.loader import Batches, iterate
from lowprec.data.open import open_data
from lowprec.data.order import SampleOrder
from lowprec.data.shards import ShardError
from lowprec.train import build as building
from tests.data.conftest import tokenize, write_shards, write_tar

SIZE, COUNT, BAD = 12, 14, 3


@pytest.fixture
def make(tmp_path):
    """A function: batches of 14 samples, one of them damaged, with or without a cache."""
    pattern = write_shards(tmp_path / "shards", [5, 9], {BAD: {"png": b"broken"}})

    def make(folder=None):
        shards, length = open_shards(pattern), tokenize(["1"]).shape[1]
        cache = folder and DecodedCache(str(folder), shards.digest, COUNT, SIZE, length)
        order = SampleOrder(shards.counts, seed=0, window=2)
        return Batches(shards, order, 7, 4, SIZE, tokenize, cache=cache)

    return make


def contents(batches, workers=0):
    return [
        (b.images.tolist(), b.tokens.tolist(), b.labels.tolist(), b.samples.tolist(), b.skips)
        for b in iterate(batches, workers=workers)
    ]


def missing(batches):
    """The samples that are not in the cache."""
    checksums = [batches.shards.locate(n)[1]["checksum"] for n in range(COUNT)]
    return [n for n in range(COUNT) if batches.cache.read(n, int(checksums[n])) is None]


def forbid_decoding(monkeypatch):
    """From here on, only the broken image may be decoded."""

    def refuse(data, *_):
        assert data == b"broken"
        raise ValueError("not a JPEG, WEBP or PNG image")

    monkeypatch.setattr(loader, "decode_image", refuse)


@pytest.mark.parametrize("workers", [0, 2])
def test_second_run_decodes_nothing_and_gets_the_same_batches(make, tmp_path, monkeypatch, workers):
    expected = contents(make())
    assert any(skips for *_, skips in expected)
    assert contents(make(tmp_path / "cache"), workers) == expected
    forbid_decoding(monkeypatch)
    assert contents(make(tmp_path / "cache"), workers) == expected


def test_damaged_missing_and_exchanged_records_are_decoded_again(make, tmp_path, monkeypatch):
    expected = contents(make(tmp_path))
    (file,) = tmp_path.glob("*.decoded")
    record = file.stat().st_size // COUNT
    content = bytearray(file.read_bytes())
    content[5 * record + 20] ^= 1
    content[6 * record : 7 * record] = bytes(record)
    eight, nine = (slice(n * record, (n + 1) * record) for n in (8, 9))
    content[eight], content[nine] = content[nine], content[eight]
    file.write_bytes(content[: -record // 2])
    assert missing(make(tmp_path)) == [BAD, 5, 6, 8, 9, COUNT - 1]
    assert contents(make(tmp_path)) == expected
    forbid_decoding(monkeypatch)
    assert contents(make(tmp_path)) == expected


def test_other_sizes_and_data_have_files_of_their_own(tmp_path):
    first = DecodedCache(str(tmp_path), "a", COUNT, SIZE, 8)
    first.write(0, 1, np.ones((3, SIZE, SIZE), np.uint8), np.ones((1, 8), np.int64))
    assert first.read(0, 1) is not None
    for change in (("b", COUNT, SIZE, 8), ("a", COUNT + 1, SIZE, 8), ("a", COUNT, 2 * SIZE, 8)):
        assert DecodedCache(str(tmp_path), *change).read(0, 1) is None


@pytest.mark.parametrize("cached", [True, False])
def test_a_shard_that_changed_unseen_ends_the_run_and_leaves_no_record(make, tmp_path, cached):
    folder = tmp_path if cached else None
    shard = tmp_path / "shards" / "train-001.tar"
    make()
    state, whole = shard.stat(), shard.read_bytes()
    shard.write_bytes(whole.replace(b"caption 8", b"caption 2"))
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    fault = r"train-001\.tar: 000008\.png .* the shard has changed.*index_shards"
    with pytest.raises(ShardError, match=fault):
        contents(make(folder))
    shard.write_bytes(whole)
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert contents(make(folder)) == contents(make())


def symlink(path, target):
    target.write_bytes(b"of someone else")
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (symlink, "Too many levels of symbolic links"),
        (lambda path, _: os.mkfifo(path), "Invalid argument"),
    ],
    ids=["link", "FIFO"],
)
def test_what_is_no_regular_file_is_a_fault_of_the_config(make, tmp_path, plant, reason):
    make(tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.decoded")
    file.unlink()
    plant(file, tmp_path / "target")
    with pytest.raises(ConfigError, match=f"data.cache=.*{file.name}: {reason}; use another"):
        make(tmp_path / "cache")
    if plant is symlink:
        assert (tmp_path / "target").read_bytes() == b"of someone else"


def test_other_code_that_decodes_has_a_file_of_its_own(make_config, tmp_path, monkeypatch):
    config = make_config({"data.cache": str(tmp_path)})
    built = building.build(config, open_data(config))
    next(built.batches_from(1))
    monkeypatch.setattr(building, "decode_image", loader.random_box)
    next(built.batches_from(1))
    built.config.data.fast_decoding = True
    next(built.batches_from(1))
    assert len(list(tmp_path.glob("*.decoded"))) == 3


def test_too_small_a_disk_is_refused_and_a_full_one_is_no_error(make, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match="data.cache=.* need another .* GB, but only 0.0 GB"):
        make(tmp_path)
    monkeypatch.undo()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    assert contents(make(tmp_path)) == contents(make())


def test_a_disk_that_can_no_longer_be_read_replaces_no_sample(make, tmp_path):
    expected, batches = contents(make(tmp_path)), make(tmp_path)
    folder = os.open(tmp_path, os.O_RDONLY)  # which cannot be read like a file
    os.dup2(folder, batches.cache._file)
    os.close(folder)
    assert contents(batches) == expected


def test_images_without_a_class_number_are_counted(squares, make_config, tmp_path, capsys):
    with tarfile.open(squares / "val-0.tar") as tar:
        whole = [(member.name, tar.extractfile(member).read()) for member in tar]
    num = len([name for name, _ in whole if name.endswith(".cls")])
    for bad, warned in (
        ((), ""),
        (("s00003.cls",), f"1 of {num} validation samples have no class"),
    ):
        named = [(name, b"tabby" if name in bad else data) for name, data in whole]
        val = write_tar(tmp_path / "val.tar", named)
        names = {
            f"data.{kind}": str(squares / f"{kind}.txt") for kind in ("classnames", "templates")
        }
        open_data(make_config({"evaluation.name": "both", "data.val": str(val), **names}))
        printed = capsys.readouterr().out
        assert warned in printed and ("warning" in printed) == bool(bad)
        shutil.rmtree(tmp_path / ".index")


def test_zero_shot_evaluation_needs_no_captions_and_does_not_cache_their_absence(
    squares, make_config, tmp_path
):
    with tarfile.open(squares / "val-0.tar") as tar:
        whole = [(member.name, tar.extractfile(member).read()) for member in tar]
    mixed = [(name, data) for name, data in whole if name != "s00003.txt"]
    bare = [(name, data) for name, data in whole if not name.endswith(".txt")]
    results = {}
    for name, members in (("whole", whole), ("mixed", mixed), ("bare", bare)):
        write_tar(tmp_path / f"{name}.tar", members)
        for task in ("zero_shot", "retrieval"):
            config = make_config(
                {
                    "evaluation.name": task,
                    "data.val": f"{tmp_path}/{name}.tar",
                    "data.cache": str(tmp_path / "cache"),
                    "data.classnames": str(squares / "classnames.txt"),
                    "data.templates": str(squares / "templates.txt"),
                }
            )
            if (name, task) == ("bare", "retrieval"):
                config.data.train = f"{tmp_path}/*.tar"  # the others have captions
                with pytest.raises(ConfigError) as error:
                    open_data(config)
                bare = f"no captions (.txt) in {tmp_path}/bare.tar"
                hint = "; evaluation=zero_shot needs none"
                assert error.value.faults == [f"data.train: {bare}", f"data.val: {bare}{hint}"]
            else:
                built = building.build(config, open_data(config))
                results[name, task] = built.evaluation()(built.task.model)
    zero_shot = [results[name, "zero_shot"] for name in ("whole", "mixed", "bare")]
    assert zero_shot == [zero_shot[0]] * 3 and "evaluation/skipped" not in zero_shot[0]
    assert results["mixed", "retrieval"]["evaluation/skipped"] == 1
