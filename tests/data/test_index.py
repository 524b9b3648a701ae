import bz2
import errno
import fcntl
import gzip
import io
import lzma
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.recfunctions import repack_fields

from lowprec.data import index
from lowprec.data.index import index_tar, open_shards
from lowprec.data.shards import ShardError, load_sealed, sealed
from tests.data.conftest import members, sample, write_shards, write_tar


@pytest.fixture
def indexed(monkeypatch):
    """The calls of index_tar so far."""
    calls = []
    monkeypatch.setattr(index, "index_tar", lambda *a: calls.append(a) or index_tar(*a))
    return calls


def bytes_of(shards, number, part):
    shard, row = shards.locate(number)
    data = Path(shards.paths[shard]).read_bytes()
    return data[row[f"{part}_offset"] :][: row[f"{part}_bytes"]]


def test_counts_labels_and_offsets_are_exact(tmp_path):
    shards = open_shards(write_shards(tmp_path, [3, 1, 5]))
    assert shards.counts.tolist() == [3, 1, 5]
    assert shards.starts.tolist() == [0, 3, 4, 9] and shards.num_samples == 9
    assert shards.labels.tolist() == [n % 7 for n in range(9)]
    for n in range(9):
        assert bytes_of(shards, n, "image") == sample(n)["png"]
        assert bytes_of(shards, n, "text") == sample(n)["txt"]


@pytest.mark.parametrize(
    ("text", "label"),
    [(b"7", 7), (b" 12\n", 12), (b"", -1), (b"cat", -1), (b"-3", -1), (b"9" * 12, -1), (None, -1)],
)
def test_label_is_a_whole_number_or_minus_one(tmp_path, text, label):
    assert open_shards(write_shards(tmp_path, [1], {0: {"cls": text}})).labels.tolist() == [label]


def test_digest_changes_with_one_byte_one_name_and_the_order(tmp_path):
    same = members(0, 3)
    variants = {
        "same": same,
        "caption": [*same[:-2], (same[-2][0], b"caption 3"), same[-1]],
        "label": [*same[:-1], (same[-1][0], b"3")],
        "name": [*same[:-3], *((n.replace("000002", "000009"), d) for n, d in same[-3:])],
        "order": [*same[3:6], *same[:3], *same[6:]],
        "fewer": same[:-3],
    }
    digests = [index_tar(str(write_tar(tmp_path / f"{n}.tar", m)))[1] for n, m in variants.items()]
    assert len(set(digests)) == len(variants)
    assert index_tar(str(write_tar(tmp_path / "moved" / "a.tar", same)))[1] == digests[0]


def test_digest_is_a_fixed_number(tmp_path):
    """Runs are identified by it: a failure here is another identity of all data."""
    members = [("a/1.jpg", b"image"), ("a/1.txt", b"caption"), ("a/1.CLS", b"7")]
    members += [("2.seg.png", b"no"), ("2.png", b""), (".txt", b"x")]
    shards = open_shards(str(write_tar(tmp_path / "a.tar", members)))
    assert shards.digest.startswith("d7175232988ff4f8")


def change_one(folder):
    path = folder / "train-001.tar"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"caption 2", b"caption 8"))
    os.utime(path, ns=(0, 10**18))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "train-001.tar").unlink(), r"train-001\.tar \(missing\)"),
        (change_one, r"train-001\.tar \(changed\)"),
        (lambda folder: shutil.copy(folder / "train-000.tar", folder / "train-009.tar"),
         r"train-009\.tar \(new\)"),
    ],
)  # fmt: skip
def test_changed_set_is_refused_until_it_is_accepted(tmp_path, change, named):
    pattern = write_shards(tmp_path, [2, 2, 2])
    before = open_shards(pattern).digest
    change(tmp_path)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"1 shards differ.*{named}.*index_shards shards="):
            open_shards(pattern)
    after = open_shards(pattern, accept=True).digest
    assert after != before and open_shards(pattern).digest == after


def test_shard_with_only_a_new_time_is_unchanged(tmp_path, indexed):
    pattern = write_shards(tmp_path, [2, 2])
    before = open_shards(pattern).digest
    os.utime(tmp_path / "train-001.tar", ns=(0, 10**18))
    assert open_shards(pattern).digest == before and len(indexed) == 3


def test_all_damaged_shards_are_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "WORTH", 1)  # by several processes
    pattern = write_shards(tmp_path, [2, 2, 2, 2])
    (tmp_path / "train-000.tar").write_bytes(b"")
    (tmp_path / "train-002.tar").write_bytes(bytes(10240))
    with pytest.raises(ValueError) as error:
        open_shards(pattern)
    assert all(name in str(error.value) for name in ("train-000.tar", "train-002.tar"))
    assert not any(name in str(error.value) for name in ("train-001.tar", "train-003.tar"))


def roll(data):
    """The index with each image beside its neighbour's caption, as valid numbers."""
    first, body = data.index(b"\x93NUMPY", 6), io.BytesIO(data)
    body.seek(first)
    table = np.load(body)
    table["text_offset"] = np.roll(table["text_offset"], 1)
    rolled = io.BytesIO()
    np.save(rolled, table)
    return data[:first] + rolled.getvalue() + data[-32:]


DAMAGE = [("train-*.npy", roll)]
DAMAGE += [
    (file, damage)
    for file in ("train-*.npy", "catalog-*.npy")
    for damage in (lambda data: b"", lambda data: data[:-32], None)
]


@pytest.mark.parametrize(("file", "damage"), DAMAGE)
def test_damaged_missing_or_old_index_is_refused_and_made_again(tmp_path, file, damage):
    pattern = write_shards(tmp_path, [2])
    digest = open_shards(pattern).digest
    (path,) = (tmp_path / ".index").glob(file)
    whole = path.read_bytes()
    path.write_bytes(damage(whole)) if damage else path.unlink()
    if file.startswith("train"):
        with pytest.raises(ShardError, match=rf"{path.name}, .*cannot be read .*index_shards"):
            open_shards(pattern).locate(1)
    assert open_shards(pattern, accept=True).digest == digest
    assert path.read_bytes() == whole


def test_a_catalog_of_an_older_version_opens_as_it_is(tmp_path, indexed):
    pattern = write_shards(tmp_path, [2], {1: {"txt": None}})
    open_shards(pattern)
    (path,) = (tmp_path / ".index").glob("catalog-*.npy")
    [catalog] = load_sealed(path)
    assert open_shards(pattern).num_captions.tolist() == [1]
    path.write_bytes(sealed(repack_fields(catalog[["path", *index.ENTRY.names]])))
    assert open_shards(pattern).num_captions.tolist() == [2]  # of which some have one
    assert len(indexed) == 1


def test_one_index_folder_serves_two_sets_with_the_same_names(tmp_path, indexed):
    patterns = [write_shards(tmp_path / place, [n]) for place, n in (("a", 1), ("b", 2))]
    folder = str(tmp_path / "index")
    assert [open_shards(pattern, folder).num_samples for pattern in patterns * 2] == [1, 2, 1, 2]
    assert len(indexed) == 2


@pytest.mark.parametrize(
    ("owner", "call", "number"), [(Path, "mkdir", errno.EROFS), (fcntl, "flock", errno.ENOLCK)]
)
def test_a_read_only_folder_opens_if_indexed(tmp_path, monkeypatch, owner, call, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    indexed, new = (write_shards(tmp_path / name, [2]) for name in ("indexed", "new"))
    open_shards(indexed)
    for catalog in (tmp_path / "indexed" / ".index").glob("catalog-*"):
        catalog.unlink()
    monkeypatch.setattr(owner, call, refuse)
    assert open_shards(indexed).num_samples == 2
    fault = rf"\.index.*{os.strerror(number)}.*data\.index="
    with pytest.raises(FileNotFoundError, match=fault):
        open_shards(new)


@pytest.mark.parametrize("names", [[], ["a.txt"], ["a.png", "b.txt"], ["a.json"]], ids=str)
def test_shard_without_a_whole_sample_is_an_error(tmp_path, names):
    write_tar(tmp_path / "empty.tar", [(name, b"x") for name in names])
    with pytest.raises(ValueError, match=r"empty\.tar holds no whole sample"):
        open_shards(str(tmp_path / "empty.tar"))


def test_compressed_shard_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar.gz", members(0, 2))
    with pytest.raises(ValueError, match=r"a\.tar\.gz is compressed.*gunzip it"):
        open_shards(str(tmp_path / "a.tar.gz"))


def test_file_that_is_no_tar_and_tar_without_pairs_are_told_apart(tmp_path):
    path = tmp_path / "a.tar"
    whole = write_tar(path, members(0, 2)).read_bytes()
    packers = {"gunzip": gzip, "bunzip2": bz2, "unxz": lzma}
    for command, packer in packers.items():
        path.write_bytes(packer.compress(whole))
        with pytest.raises(
            ValueError, match=rf"a\.tar is compressed .*: {command} it; data=stream"
        ):
            index_tar(str(path))
    path.write_bytes(b"PAR1" + bytes(1000))
    with pytest.raises(ValueError, match=r"a\.tar is damaged: .*; perhaps it is not a tar file"):
        index_tar(str(path))
    link = tarfile.TarInfo("b.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/b.jpg"
    named = [("v1.a.jpg", b"x"), (link, b""), ("c.json", b"x"), ("d.txt", b"")]
    write_tar(path, named)
    with pytest.raises(ValueError) as error:
        index_tar(str(path))
    first = "KEY has no dot; its first members: v1.a.jpg, b.jpg (a link), c.json, d.txt"
    assert str(error.value).endswith(first)
    write_tar(path, [("a.jpg", b"x"), ("a.cls", b"tabby")])
    with pytest.raises(ValueError, match=r"a\.cls is not a class number \(0, 1, \.\.\.\)$"):
        index_tar(path)


def test_pairs_whose_names_have_more_dots_are_refused_but_not_other_fields(tmp_path):
    names = ["9.seg.png", "9.blip.txt", "._8.jpg", "._8.txt", "000001.crop.png", "000001.crop.txt"]
    path = str(write_tar(tmp_path / "a.tar", [*members(0, 2), *((name, b"x") for name in names)]))
    assert len(index_tar(path)[0]) == 2
    for text in ("txt", "cls"):
        lost = [(f"a/v1.{n}.{kind}", b"1") for n in range(3) for kind in ("JPG", text)]
        write_tar(tmp_path / "a.tar", [*members(0, 2), *lost])
        with pytest.raises(ValueError, match=r"a\.tar: pairs such as 'a/v1\.0' \(3 in all\) would"):
            index_tar(path)


def test_large_sets_are_indexed_by_all_cores(tmp_path, monkeypatch):
    used, run_jobs = [], index.run_jobs
    monkeypatch.setattr(index, "num_cores", lambda: 2)
    monkeypatch.setattr(index, "run_jobs", lambda *a: used.append(a[2]) or run_jobs(*a))
    small = open_shards(write_shards(tmp_path / "small", [2, 2, 2]))
    monkeypatch.setattr(index, "WORTH", 1)
    large = open_shards(write_shards(tmp_path / "large", [2, 2, 2]))
    assert used == [1, 2] and small.digest == large.digest


def test_waiting_for_the_lock_does_not_index_again(tmp_path, indexed):
    pattern = write_shards(tmp_path, [2])
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(open_shards, [pattern] * 8))
    assert len({shards.digest for shards in digests}) == 1 and len(indexed) == 1


def test_restored_shard_is_not_read_by_the_table_of_the_refused_one(tmp_path):
    pattern = write_shards(tmp_path / "set", [2, 2, 2])
    before = open_shards(pattern)
    shutil.copytree(tmp_path / "set", tmp_path / "kept")  # with its times
    longer = {2: {"txt": b"a much longer caption " * 60}}
    write_shards(tmp_path / "set", [2, 2, 2], longer)
    with pytest.raises(ValueError, match=r"train-001\.tar \(changed"):
        open_shards(pattern)
    for path in (tmp_path / "kept").glob("*.tar"):
        shutil.copy2(path, tmp_path / "set" / path.name)
    with pytest.raises(ShardError, match="rebuilt.*experiments.index_shards makes it again"):
        open_shards(pattern).locate(2)
    again = open_shards(pattern, accept=True)
    assert again.digest == before.digest
    assert [bytes_of(again, n, "text") for n in range(6)] == [sample(n)["txt"] for n in range(6)]


def test_a_shard_of_a_folder_of_images_as_the_page_makes_it(tmp_path):
    page = (Path(index.__file__).parent / "README.md").read_text()
    [command] = re.findall(r"`(tar [^`]*)`", page)
    for n in range(5):
        photo = tmp_path / "photos" / "deep" / f"{n}.jpg"
        photo.parent.mkdir(parents=True, exist_ok=True)
        photo.write_bytes(sample(n)["png"])
        photo.with_suffix(".txt").write_bytes(sample(n)["txt"])
    subprocess.run(shlex.split(command), cwd=tmp_path, check=True)
    shards = open_shards(f"{tmp_path}/train-0.tar")
    assert shards.counts.tolist() == [5]
    for n in range(5):
        assert bytes_of(shards, n, "image") == sample(n)["png"]
        assert bytes_of(shards, n, "text") == sample(n)["txt"]


def test_full_disk_while_indexing_names_path_and_free_bytes(tmp_path, monkeypatch):
    def fail(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lowprec.runs.durable._write_whole", fail)
    with pytest.raises(ValueError, match=r"train-000.* cannot be written: No space.*are free"):
        open_shards(write_shards(tmp_path, [1]))
