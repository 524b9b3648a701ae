"""Streams: exact order and resume, and each fault in the skips."""

import base64
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import lowprec.data.stream
from lowprec.config.check import ConfigError
from lowprec.data import loader
from lowprec.data.open import open_data
from lowprec.data.shards import ShardError
from lowprec.data.sources import ShardUrls, check_readers
from lowprec.data.stream import Stream, _Source, read_url
from lowprec.runs.attempts import STOPPING
from lowprec.runs.read import read_rows
from tests.data.conftest import encode, members, same, tokenize, write_tar

ROOT = Path(lowprec.data.stream.__file__).parents[2]
SIZE = 12


@pytest.fixture
def put_file(tmp_path):
    """A function: a shard of a range of samples, some changed; returns its path."""

    def put_file(name, numbers, change=None):
        named = members(numbers.start, numbers.stop, change)
        return str(write_tar(tmp_path / "served" / name, named))

    return put_file


@pytest.fixture
def put(server, put_file):
    """The same; returns the shard's URL."""

    def put(name, numbers, change=None):
        put_file(name, numbers, change)
        return f"{server.url}/{name}"

    return put


@pytest.fixture
def eight(put_file):
    """Eight shards of six samples; number 20 has no image, number 33 a blank caption."""
    change = {20: {"png": b"broken"}, 33: {"txt": b" "}}
    return [put_file(f"{i}.tar", range(6 * i, 6 * i + 6), change) for i in range(8)]


def make_stream(urls, **changes):
    options = {"seed": 0, "batch_size": 4, "num_steps": 12, "segment_steps": 4, "workers": 0}
    options |= {"image_size": SIZE, "tokenizer": tokenize, **changes}
    return Stream(ShardUrls(urls), **options)


def read(urls, first=1, **changes):
    return list(make_stream(urls, **changes).batches_from(first))


def numbers(batches):
    return [number for batch in batches for number in batch.tokens[:, 0].tolist()]


def test_a_batch_holds_whole_samples(put):
    url = put("a.tar", range(8), {3: {"cls": None}, 5: {"cls": b"x"}})
    batch, second = read([url], num_steps=2)
    assert sorted(numbers([batch, second])) == list(range(8))
    labels = dict(zip(numbers([batch, second]), [*batch.labels, *second.labels], strict=True))
    assert labels == {n: -1 if n in (3, 5) else n % 7 for n in range(8)}
    assert batch.images.shape == (4, 3, SIZE, SIZE) and batch.images.dtype == torch.uint8
    assert batch.samples.tolist() == [-1] * 4 and batch.skips == []


def test_order_depends_on_seed_segment_and_number_of_workers_only(eight):
    whole = read(eight)
    random.seed(5)
    assert len(whole) == 12 and all(map(same, whole, read(eight, workers=1)))
    segments = [numbers(whole[i : i + 4]) for i in (0, 4, 8)]
    assert segments[0] != segments[1] != segments[2] != segments[0]
    assert numbers(read(eight, seed=1)) != numbers(whole) != numbers(read(eight, workers=2))
    layouts = [make_stream(eight, workers=workers).layout() for workers in (0, 1, 2)]
    assert [layout["workers"] for layout in layouts] == [1, 1, 2]
    assert make_stream(eight, world_size=2, rank=1, workers=3).layout()["world_size"] == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_a_boundary_reads_nothing_twice(server, eight, workers, monkeypatch):
    eight = [f"{server.url}/{Path(path).name}" for path in eight]
    monkeypatch.setattr(lowprec.data.stream, "SHUFFLED", 3)
    undisturbed = make_stream(eight, workers=workers).batches_from(1)
    before = [next(undisturbed) for _ in range(4)]
    asked_before = Counter(server.log)
    after = list(undisturbed)
    asked_after = Counter(server.log) - asked_before
    assert before and sum(asked_before.values()) >= 3 and len(after) == 8
    server.log.clear()
    assert all(map(same, read(eight, first=5, workers=workers), after))
    assert Counter(server.log) == asked_after


@pytest.mark.parametrize(("workers", "first"), [(0, 12), (2, 7)])
def test_resuming_within_a_segment_is_the_continuation(eight, workers, first):
    whole = read(eight, workers=workers)
    tail = read(eight, first=first, workers=workers)
    assert len(tail) == 13 - first and all(map(same, tail, whole[first - 1 :]))
    assert any(batch.skips for batch in whole)


def test_each_sample_comes_once_per_pass_and_passes_differ(eight):
    batches = read(eight, batch_size=46, num_steps=3, segment_steps=3)
    seen = numbers(batches)
    passes = [seen[i : i + 46] for i in (0, 46, 92)]
    good = sorted(set(range(48)) - {20, 33})
    assert all(sorted(one) == good for one in passes)
    assert passes[0] != passes[1] != passes[2]
    named = Counter(skip["key"] for batch in batches for skip in batch.skips)
    assert set(named) == {"000020", "000033"} and max(named.values()) <= 3  # once a pass
    shards = [n // 6 for n in passes[0]]
    assert sum(a != b for a, b in zip(shards, shards[1:], strict=False)) > 20  # they are mixed


def test_ranks_and_workers_share_the_shards_of_a_pass(put_file):
    urls = [put_file(f"{i}.tar", range(6 * i, 6 * i + 6)) for i in range(8)]
    options = {"batch_size": 8, "num_steps": 6, "segment_steps": 6, "workers": 2}
    parts = [numbers(read(urls, rank=rank, world_size=2, **options)) for rank in (0, 1)]
    assert not {n // 6 for n in parts[0]} & {n // 6 for n in parts[1]}
    assert sorted(parts[0] + parts[1]) == list(range(48))


def test_packed_shards_files_and_commands_stream_too(server, put):
    urls = [put("a.tar.gz", range(3)), *(put(f"{name}.tar", range(3)) for name in "bc")]
    urls[1:] = [f"{server.folder}/b.tar", f"pipe:cat {server.folder}/c.tar"]
    batches = read(urls, batch_size=9, num_steps=1)
    assert sorted(numbers(batches)) == [0, 0, 0, 1, 1, 1, 2, 2, 2] and batches[0].skips == []


def test_signals_do_not_end_curl(server, put):
    source = _Source(put("a.tar", range(4)))
    for number in STOPPING:
        os.kill(source.command.pid, number)
    received = b"".join(iter(lambda: source.read(1 << 20), b""))
    source.close()
    assert received == (server.folder / "a.tar").read_bytes()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & STOPPING


@pytest.mark.parametrize(
    ("url", "allowed"), [("http://h/a", "=http,https"), ("https://h/a", "=https")]
)
def test_a_redirect_cannot_leave_http_nor_its_encryption(monkeypatch, url, allowed):
    commands = []

    def refuse(command, **_):
        commands.append(command)
        raise OSError("no process is started here")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no process"):
        _Source(url)
    ((*_, option, value, last),) = commands
    assert (option, value, last) == ("--proto-redir", allowed, url)


def test_missing_urls_are_named_without_their_secrets_and_other_shards_are_read(server, put):
    secret = f"http://user:s3cret@127.0.0.1:{server.server_port}"
    gone = [f"{secret}/gone.tar?sig=s3cret", "http://u:s3cret@127.0.0.1:1/refused.tar"]
    (batch,) = read([put("a.tar", range(4)), *gone], num_steps=1)
    assert sorted(numbers([batch])) == [0, 1, 2, 3]
    assert f"Basic {base64.b64encode(b'user:s3cret').decode()}" in server.users
    rows = sorted((skip["reason"], skip["shard"]) for skip in batch.skips)
    for row, facts in zip(rows, (("22", "/gone.tar"), ("7", "/refused.tar")), strict=True):
        assert f"status {facts[0]}" in row[0] and facts[1] in row[1]
    assert "s3cret" not in str(batch.skips)
    with pytest.raises(ShardError) as raised:
        read(gone)
    assert "s3cret" not in str(raised.value)


def test_crops_depend_on_seed_segment_pass_and_sample(put):
    large = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    url = put("a.tar", range(4), dict.fromkeys(range(4), {"png": encode(large)}))

    def images(**changes):
        options = {"augment": True, "segment_steps": 2, "num_steps": 4, **changes}
        return {
            (step, number): image
            for step, batch in enumerate(read([url], **options))
            for number, image in zip(numbers([batch]), batch.images, strict=True)
        }

    first, again, other = images(), images(), images(seed=1)
    assert all(torch.equal(first[at], again[at]) for at in first)
    assert any(not torch.equal(first[at], other[at]) for at in first)
    for number in range(4):
        views = {first[step, number].numpy().tobytes() for step in range(4)}
        assert len(views) == 4  # two passes in each of two segments
    assert len({first[0, number].numpy().tobytes() for number in range(4)}) == 4


def test_too_few_shards_for_the_workers_are_refused(make_config, squares):
    changes = {"data.name": "stream", "data.val": None, "num_workers": 3}
    with pytest.raises(ConfigError, match="2 shards for 1 ranks of 3 workers.*num_workers=2 fits"):
        open_data(make_config(changes))
    assert len(open_data(make_config(changes | {"num_workers": 2})).train.urls) == 2
    with pytest.raises(ValueError, match="3 shards for 4 ranks .* 3 ranks fit"):
        check_readers(ShardUrls(["a", "b", "c"]), 2, world_size=4)


def test_a_stopped_stream_goes_on(server, squares, make_config, run_once, tmp_path):
    for path in squares.glob("train-*.tar"):
        data = bytearray(path.read_bytes())
        data[30 * 512] ^= 255 * path.name.startswith("train-0")
        (server.folder / path.name).write_bytes(data)
    config = make_config({
        "data.name": "stream", "data.train": f"{server.url}/train-{{0..1}}.tar", "data.val": None,
        "data.allow_remote": ["http"], "data.augment": "crop_flip",
        "num_workers": 1, "num_steps": 8,
    })  # fmt: skip
    ended, _ = run_once(config, tmp_path / "whole")
    assert (ended.state, ended.step) == ("finished", 8)
    ended, _ = run_once(config, tmp_path / "cut", stop_at=6)
    assert (ended.state, ended.step) == ("preempted", 6)
    ended, _ = run_once(config, tmp_path / "cut")
    assert ended.state == "finished"
    for name in ("metrics.jsonl", "skips.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert read_rows(tmp_path / "whole" / "skips.jsonl")


def test_damaged_shard_is_named_and_other_shards_are_read(put_file):
    good, bad = put_file("good.tar", range(10, 16)), put_file("bad.tar", range(6))
    with tarfile.open(bad) as tar:
        third = tar.getmember("000002.png").offset
    whole = Path(bad).read_bytes()
    header = third + 1536  # after an image
    Path(bad).write_bytes(whole[:header] + b"?" + whole[header + 1 :])
    # The row of a shard that ends the pass comes with the first sample of the next.
    batches = read([good, bad], num_steps=9, batch_size=1, segment_steps=99)
    assert sorted(numbers(batches)[:-1]) == [0, 1, *range(10, 16)]
    rows = {(s["shard"], s["key"], s["reason"][:30]) for batch in batches for s in batch.skips}
    assert {row[:2] for row in rows} == {(bad, ""), (bad, "000002")} and len(rows) == 2
    assert {row[2].split(":")[0] for row in rows} == {"DamagedError", "ValueError"}


def test_pairs_whose_names_have_more_dots_are_named_once(put_file, tmp_path, capsys):
    dotted = [(f"v1.{n}.{kind}", b"x") for n in range(3) for kind in ("png", "txt")]
    mixed = str(write_tar(tmp_path / "mixed.tar", [*members(0, 4), *dotted]))
    batches = read([mixed, put_file("good.tar", range(10, 14))], num_steps=6)
    assert sorted(numbers(batches[:2])) == [0, 1, 2, 3, 10, 11, 12, 13]
    lost = "pairs such as 'v1.0' (3 in all) would be lost"
    assert capsys.readouterr().err.count(f"warning: {mixed}: {lost}") == 1
    assert not any(batch.skips for batch in batches)  # which end a run if there are many
    with pytest.raises(ShardError, match=r"no readable sample .* would be lost"):
        read([str(write_tar(tmp_path / "dotted.tar", dotted))], num_steps=1)


def memory_of(action):
    """Most bytes that Python allocates meanwhile."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("txt", "more than 8,192"), ("png", "more than 524,288"), ("cls", None), ("json", None)],
)
def test_small_archives_that_unpack_to_much_fill_no_memory(put_file, monkeypatch, kind, reason):
    monkeypatch.setattr(loader, "LARGEST_IMAGE", 2**19)
    monkeypatch.setattr(lowprec.data.stream, "HELD_BYTES", 2**21)
    bomb = put_file("a.tar.gz", range(60), {n: {kind: bytes(2**20)} for n in range(59)})
    assert Path(bomb).stat().st_size < 2**18
    batches = []
    peak = memory_of(lambda: batches.extend(read([bomb], num_steps=1, batch_size=1)))
    assert peak < 3 * 2**24, f"{peak:,} bytes"
    assert len(batches[0].images) == 1
    assert all(reason and reason in skip["reason"] for skip in batches[0].skips)


def test_pass_without_a_readable_sample_is_an_error(tmp_path, put_file):
    bad = put_file("bad.tar", range(6), {n: {"txt": b""} for n in range(6)})
    with pytest.raises(ShardError, match="no readable sample in a worker's 2 of 2 shards"):
        read([bad, str(tmp_path / "gone.tar")])
    once = f"pipe:cat {put_file('a.tar', range(4))} && rm {tmp_path}/served/a.tar"
    assert len(read([once], num_steps=4, batch_size=1)) == 4
    put_file("a.tar", range(4))
    with pytest.raises(ShardError, match="a.tar .*: OSError: the command failed with status 1"):
        read([once], num_steps=5, batch_size=1, segment_steps=99)


def test_failure_of_a_command_comes_after_its_output_and_closing_ends_it(put_file):
    path, received = put_file("a.tar", range(2)), []
    with pytest.raises(OSError, match="^the command failed with status 3$"):
        received += (member for member in read_url(f"pipe:cat {path}; exit 3"))
    assert len(received) == 6 and received == list(read_url(path))
    source = _Source("pipe:yes")
    assert source.read(2) == b"y\n"
    source.close()
    assert source.command.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["stall.tar", "trickle.tar"])
def test_a_server_that_stalls_is_left_and_named(server, put, monkeypatch, name):
    in_a_second = ["1" if word == "60" else word for word in lowprec.data.stream.CURL]
    monkeypatch.setattr(lowprec.data.stream, "CURL", in_a_second)
    urls = [put("good.tar", range(10, 16)), f"{server.url}/{name}"]
    batches = read(urls, num_steps=2, batch_size=5)
    assert set(numbers(batches)) == set(range(10, 16))
    rows = [skip for batch in batches for skip in batch.skips]
    assert rows and {row["shard"] for row in rows} == {urls[1]}
    fault = "curl failed with status 28 (less than 100 B/s for a minute)"
    assert all(fault in row["reason"] for row in rows)


def descendants(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [d for c in children for d in descendants(c)]


PROGRAM = """
import sys
from lowprec.data.sources import ShardUrls
from lowprec.data.stream import Stream

stream = Stream(ShardUrls(sys.argv[1:]), seed=0, batch_size=1, num_steps=9, segment_steps=9,
                workers=2, image_size=8, tokenizer=None)
next(stream.batches_from(1))
"""


def test_workers_and_curl_end_with_a_killed_process(server):
    urls = [f"{server.url}/stall-{number}.tar" for number in (0, 1)]
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM, *urls], cwd=ROOT)
    try:
        while len(server.log) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        children = descendants(process.pid)
        assert len(children) >= 4  # two workers, two curls
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{child}/cmdline").exists() for child in children):
        assert time.monotonic() < end
        time.sleep(0.05)
