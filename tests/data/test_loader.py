import atexit
import io
import multiprocessing
import multiprocessing.util
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from lowprec.clip import open_clip
from lowprec.clip.text import Tokenizer
from lowprec.data import loader
from lowprec.data.index import open_shards
from lowprec.data.loader import AREA, CROP_WORDS, RATIO, Batches, decode_image, iterate, random_box
from lowprec.data.order import AUGMENTATION, SampleOrder, random_words
from lowprec.data.shards import ShardError
from lowprec.data.workers import ahead
from lowprec.train.signals import StopWaiting, stop_request
from tests.data.conftest import encode, same, sample, tokenize, write_shards

torch.set_num_threads(1)
SIZE = 12


class InOrder:
    """Sample n at position n, over and over."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def samples(self, first, count):
        return np.arange(first, first + count) % self.num_samples


@pytest.fixture
def make_batches(tmp_path):
    """A function: batches of generated shards, some samples changed."""

    def make(
        counts=(5, 3, 6), change=None, *, sequential=False, seed=0, batch_size=4, length=9, **more
    ):
        shards = open_shards(write_shards(tmp_path / "shards", list(counts), change))
        order = InOrder(shards.num_samples) if sequential else None
        order = order or SampleOrder(shards.counts, seed=seed, window=2)
        return Batches(
            shards, order, batch_size=batch_size, num_batches=length, image_size=SIZE,
            tokenizer=tokenize, seed=seed, **more,
        )  # fmt: skip

    return make


def numbers(batch):
    return batch.tokens[:, 0].tolist()


def test_batch_holds_the_samples_of_its_step_in_order(make_batches):
    batches = make_batches()
    for step in (0, 1, 5):
        batch, expected = batches[step], batches.order.samples(4 * step, 4).tolist()
        assert numbers(batch) == expected
        assert batch.labels.tolist() == [n % 7 for n in expected]
        images = [decode_image(sample(n)["png"], SIZE) for n in expected]
        np.testing.assert_array_equal(batch.images.numpy(), np.stack(images))
        assert batch.images.dtype == torch.uint8 and batch.skips == []


def test_batches_do_not_depend_on_workers_or_the_first_batch(make_batches):
    """Nor do they change the random states of the process."""
    batches = make_batches(change={3: {"png": b"broken"}})
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    alone = list(iterate(batches, workers=0))
    assert len(alone) == 9 and any(batch.skips for batch in alone)
    for workers, first in ((2, 0), (2, 4), (0, 4)):
        tail = list(iterate(batches, workers=workers, first=first))
        assert len(tail) == 9 - first and all(map(same, tail, alone[first:]))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_state)


def test_bad_sample_is_replaced_and_listed(make_batches):
    batches = make_batches(change={2: {"png": b"not an image"}}, sequential=True, length=4)
    batch = batches[0]
    (skip,) = batch.skips
    assert (skip["position"], skip["shard"], skip["key"]) == (2, "train-000.tar", "000002.png")
    assert [n for i, n in enumerate(numbers(batch)) if i != 2] == [0, 1, 3]
    assert numbers(batch)[2] != 2 and same(batch, batches[0])


def test_replacement_depends_on_the_position_and_the_seed(make_batches):
    change = {n: {"txt": b""} for n in range(20, 40)}
    replaced = [
        n
        for seed in (0, 1)
        for batch in iterate(
            make_batches((40,), change, sequential=True, seed=seed, length=10), workers=0
        )
        for n in numbers(batch)[-20:]
    ]
    assert len(set(replaced[20:40])) > 5 and replaced[20:40] != replaced[60:]
    assert max(replaced) < 20


def test_no_readable_sample_is_an_error(make_batches):
    batches = make_batches((2,), {n: {"txt": b""} for n in range(2)})
    with pytest.raises(ShardError, match="no readable sample for position 0 in 100 tries"):
        batches[0]


@pytest.mark.parametrize("shape", [(12, 12), (12, 30), (31, 12), (5, 5), (1, 1), (50, 50)], ids=str)
def test_decoded_image_is_the_bicubically_resized_center(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    top, left = ((side - min(shape)) // 2 for side in shape)
    square = Image.fromarray(pixels[top : top + min(shape), left : left + min(shape)])
    expected = np.asarray(square.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(decode_image(encode(pixels), SIZE), expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "jpeg"), ("RGB", "webp"), *((m, "png") for m in "L 1 P RGBA LA I;16".split())],
)
def test_every_mode_becomes_rgb(mode, kind):
    file, gray = io.BytesIO(), Image.new("L", (15, 20), 120)
    wide = Image.fromarray(np.asarray(gray).astype(np.uint16) * 257)  # 16 bits
    (wide if mode == "I;16" else gray.convert(mode)).save(file, kind)
    pixels = decode_image(file.getvalue(), SIZE).astype(int)
    assert pixels.shape == (3, SIZE, SIZE)
    assert mode == "1" or abs(pixels - 120).max() <= 4 * (kind != "png")


def test_sequential_reading_leaves_bad_samples_out(make_batches):
    batches = make_batches((5, 5), {2: {"txt": b""}})
    batches.order = None
    loaded = [batches[i] for i in range(3)]
    assert [numbers(batch) for batch in loaded] == [[0, 1, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(batch.skips) for batch in loaded] == [1, 0, 0]
    assert all(len(batch.images) == len(batch.labels) == len(numbers(batch)) for batch in loaded)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), (2, 2)])
def test_samples_of_a_step_do_not_depend_on_ranks_and_workers(make_batches, ranks, workers):
    """Neither do their pixels, random crops included."""
    keys = {"batch_size": 8, "length": 5, "augment": True}
    alone = make_batches(**keys)
    parts = [make_batches(**keys, rank=rank, world_size=ranks) for rank in range(ranks)]
    parts = [iterate(part, workers=workers) for part in parts]
    for step, shares in enumerate(zip(*parts, strict=True)):
        assert [len(share.samples) for share in shares] == [8 // ranks] * ranks
        for name in ("samples", "images", "tokens", "labels"):
            whole = torch.cat([getattr(share, name) for share in shares])
            assert torch.equal(whole, getattr(alone[step], name))


def pixels_by_sample(batches, epoch=0):
    """Sample number to pixels, over one epoch."""
    size, batch_size = batches.shards.num_samples, batches.batch_size
    steps = range(epoch * size // batch_size, -(-(epoch + 1) * size // batch_size))
    pixels = {}
    for step in steps:
        batch = batches[step]
        for place, number in enumerate(batch.samples.tolist()):
            if (step * batch_size + place) // size == epoch:
                pixels[number] = batch.images[place].numpy().tobytes()
    return pixels


def test_augmentation_depends_on_seed_epoch_and_sample_and_on_nothing_else(make_batches):
    reference = pixels_by_sample(make_batches(augment=True))
    assert len(reference) == 14
    for changes in ({"batch_size": 9}, {"sequential": True}, {"counts": (5, 3, 6), "length": 3}):
        assert pixels_by_sample(make_batches(augment=True, **changes)) == reference
    for other in (
        pixels_by_sample(make_batches(augment=True), epoch=1),
        pixels_by_sample(make_batches(augment=True, seed=1)),
        pixels_by_sample(make_batches()),
    ):
        same_pixels = sum(other[number] == reference[number] for number in range(14))
        assert same_pixels <= 2  # images of 16 x 12 have few different boxes


BLOCKING = {  # captions: a word of the reason
    "a" * 60000: "60,000 bytes",
    "ab" * 1000: "a word",
    "!?" * 900: "a word",
    "&#" + "9" * 5000: "limit",  # of digits, when the tokenizer reads it as a letter
}


@pytest.mark.parametrize(("caption", "reason"), BLOCKING.items(), ids=range(4))
def test_caption_that_blocks_or_fails_the_tokenizer_is_a_skip(make_batches, caption, reason):
    change = {1: {"txt": b"word " * 1000}, 2: {"txt": caption.encode()}}
    batches = make_batches(change=change, sequential=True)
    batches.tokenizer = Tokenizer(16)
    (skip,) = batches[0].skips
    assert skip["key"] == "000002.png" and reason in skip["reason"]


def test_silent_worker_ends_with_its_deadline(make_batches, monkeypatch):
    def hang(data):
        time.sleep(99 * (data == b"caption 6"))
        return data.decode()

    monkeypatch.setattr("lowprec.data.workers.SILENT_S", 1)
    monkeypatch.setattr(loader, "decode_caption", hang)
    batches = iterate(make_batches(sequential=True), workers=2)
    assert numbers(next(batches)) == [0, 1, 2, 3]
    with pytest.raises(ShardError, match="the data workers made no batch for 1 s"):
        next(batches)
    assert not multiprocessing.active_children()


def test_workers_end_with_the_iterator(make_batches):
    batches = iterate(make_batches(), workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert not multiprocessing.active_children()


def test_a_process_that_exits_while_a_worker_is_stuck_ends_at_once():
    def hang(worker, workers):
        yield
        time.sleep(60)

    begin, child = time.monotonic(), os.fork()
    if child == 0:
        atexit._clear()  # of what pytest does at its exit
        atexit.register(multiprocessing.util._exit_function)  # waits for the workers
        batches = ahead(hang, workers=1, pin=False)
        next(batches)
        atexit._run_exitfuncs()
        os._exit(0)
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() - begin < 20:
        time.sleep(0.05)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)  # within 20 s


def test_a_signal_ends_waiting_for_stuck_workers_within_seconds(capfd):
    def hang(worker, workers):
        time.sleep(60)
        yield

    with stop_request() as stop:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begin = time.monotonic()
        with pytest.raises(StopWaiting), stop.waiting():
            next(ahead(hang, workers=2, pin=False))
        assert time.monotonic() - begin < 5
    assert not multiprocessing.active_children()
    assert capfd.readouterr().err.splitlines() == [
        "",
        "SIGTERM: saving and stopping after this step",
    ]


def test_workers_survive_repeated_signals(make_batches):
    batches = make_batches(length=200)
    count = 0
    for batch in iterate(batches, workers=2):
        if count % 10 == 0:
            for _ in range(2):  # the second while the first is being handled, now and then
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGTERM)
        count += len(batch.labels) > 0
    assert count == 200


SIZES = [(64, 64), (256, 256), (500, 375), (375, 500), (100, 60), (300, 40), (40, 300)]
TINY = [(1, 1), (1, 30), (30, 1), (2, 3), (7, 3)]


def words(sample, epoch=0):
    return random_words(0, AUGMENTATION, epoch, sample, CROP_WORDS)


@pytest.mark.parametrize("size", SIZES + TINY, ids=str)
def test_random_box_lies_within_the_image_and_is_not_empty(size):
    for number in range(50):
        left, top, right, bottom = random_box(*size, words(number))
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


def test_crops_have_the_areas_of_open_clip():
    assert AREA == open_clip.transform.AugmentationCfg().scale == (0.9, 1.0)


@pytest.mark.parametrize("area", [AREA, (0.08, 1.0)], ids=str)
def test_crops_are_distributed_like_those_of_torchvision(area, monkeypatch):
    from torchvision.transforms import RandomResizedCrop  # which lowprec.clip makes importable

    monkeypatch.setattr(loader, "AREA", area)
    size = (500, 375)
    count, image = 2000, Image.new("RGB", size)
    ours = np.array([random_box(*size, words(sample)) for sample in range(count)], dtype=float)
    ours = np.stack([ours[:, 1], ours[:, 0], ours[:, 3] - ours[:, 1], ours[:, 2] - ours[:, 0]], 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [RandomResizedCrop.get_params(image, list(area), list(RATIO)) for _ in ours]
    theirs = np.array(theirs, dtype=float)
    for of in (  # of rows top, left, height, width
        lambda boxes: boxes[:, 2] * boxes[:, 3],
        lambda boxes: np.log(boxes[:, 3] / boxes[:, 2]),
        lambda boxes: boxes[:, 0],
        lambda boxes: boxes[:, 1],
    ):
        a, b = of(ours), of(theirs)
        spread = ((a.var() + b.var()) / count) ** 0.5
        assert abs(a.mean() - b.mean()) < 4 * spread  # 4 standard deviations
        assert 0.8 < a.std() / b.std() < 1.25  # of 2000 draws: known to about 2 %


RANDOM = pytest.mark.parametrize("random", [None, words(3)], ids=["central", "random"])


def ramps(width, height):
    """An RGB image of two linear ramps, so that pixels tell the box."""
    grid = np.meshgrid(np.linspace(0, 255, width), np.linspace(255, 0, height))
    return Image.fromarray(np.stack([*grid, grid[0]], axis=2).astype(np.uint8))


def crop_and_resize(image, size, box):
    return np.asarray(image.crop(box).resize((size, size), Image.Resampling.BICUBIC))


@RANDOM
@pytest.mark.parametrize(("side", "divisor"), [(22, 1), (30, 1), (40, 2), (83, 4), (170, 4)])
def test_fast_decoding_scales_a_jpeg_so_that_the_box_keeps_at_least_the_models_pixels(
    monkeypatch, random, side, divisor
):
    file = io.BytesIO()
    ramps(side + 9, side).save(file, "JPEG", quality=100)
    full = decode_image(file.getvalue(), 16, random).astype(int)
    resized, resize = [], loader.resize_by_torch
    monkeypatch.setattr(
        loader, "resize_by_torch", lambda *args: resized.append(args) or resize(*args)
    )
    fast = decode_image(file.getvalue(), 16, random, fast=True)
    ((image, size, (left, top, right, bottom)),) = resized
    assert image.height == -(-side // divisor)
    assert size == 16 and min(right - left, bottom - top) >= 16
    assert np.abs(fast - full).max() <= 255 / 16  # at most a pixel of the box


@RANDOM
@pytest.mark.parametrize("shape", [(12, 12), (20, 31), (30, 20), (1, 1), (1, 30), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "kind", ["jpeg RGB", "jpeg L", "jpeg CMYK", "jpeg progressive", "jpeg EXIF", "webp RGB"]
    + [f"png {mode}" for mode in ("RGB", "RGBA", "L", "P", "I;16")],
)  # fmt: skip
def test_fast_decoding_of_any_file_is_pils_resize_but_for_rounding(
    monkeypatch, random, shape, kind
):
    kind, mode = kind.split()
    noise = np.random.default_rng(0).integers(64, 192, (*shape, 3), dtype=np.uint8)
    image, options = Image.fromarray(noise), {}
    if mode == "EXIF":
        options["exif"] = image.getexif()
        options["exif"][0x0112] = 6  # turned by 90 degrees, which decoding ignores
    elif mode == "progressive":
        options["progressive"] = True
    elif mode == "I;16":
        image = Image.fromarray(noise[:, :, 0].astype(np.uint16) * 257)
    else:
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    fast = decode_image(file.getvalue(), 24, random, fast=True)
    assert fast.shape == (3, 24, 24) and fast.dtype == np.uint8
    monkeypatch.setattr(loader, "resize_by_torch", crop_and_resize)
    twin = decode_image(file.getvalue(), 24, random, fast=True).astype(int)
    assert np.abs(fast - twin).max() <= 1


@pytest.mark.parametrize("shape", [(12, 12), (20, 30), (30, 20), (1, 1), (1, 30)], ids=str)
def test_augmented_image_is_the_random_box_resized_bicubically_and_flipped(shape):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    random = words(3)
    box = random_box(shape[1], shape[0], random)
    expected = Image.fromarray(pixels).resize((12, 12), Image.Resampling.BICUBIC, box)
    expected = np.asarray(expected).transpose(2, 0, 1)
    for random[-1], image in ((0, expected), (np.uint64(1) << np.uint64(63), expected[:, :, ::-1])):
        np.testing.assert_array_equal(decode_image(encode(pixels), 12, random), image)
