import numpy as np
import pytest
import torch
from PIL import Image

from lowprec.clip.torchvision_shim import open_clip
from lowprec.data import loader
from lowprec.data.loader import AREA, CROP_WORDS, RATIO, decode_image, random_box
from lowprec.data.order import AUGMENTATION, random_words

SIZES = [(64, 64), (256, 256), (500, 375), (375, 500), (100, 60), (300, 40), (40, 300)]
TINY = [(1, 1), (1, 30), (30, 1), (2, 3), (7, 3)]


def words(sample, epoch=0):
    return random_words(0, AUGMENTATION, epoch, sample, CROP_WORDS)


@pytest.mark.parametrize("size", SIZES + TINY, ids=str)
def test_random_box_lies_within_the_image_and_is_not_empty(size):
    for sample in range(300):
        left, top, right, bottom = random_box(*size, words(sample))
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]


@pytest.mark.parametrize("size", SIZES[:4], ids=str)
def test_random_box_has_the_area_and_ratio_asked_for(size):
    """Or the ratio of the image at most, where no box of that area fits."""
    boxes = np.array([random_box(*size, words(sample)) for sample in range(1000)])
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    rounding = 1 / min(size)  # half a pixel on each of two sides
    ratio, area = width / height, width * height / (size[0] * size[1])
    assert (1 - rounding) * RATIO[0] <= ratio.min() and ratio.max() <= (1 + rounding) * RATIO[1]
    assert (1 - rounding) * AREA[0] <= area.min() and area.max() <= AREA[1]
    assert len(np.unique(boxes, axis=0)) > 100
    assert area.std() > 0.01 and ratio.std() > 0.01


@pytest.mark.parametrize("size", [(300, 40), (40, 300)], ids=str)
def test_box_of_an_image_of_extreme_shape_is_the_largest_in_its_middle(size):
    left, top, right, bottom = random_box(*size, words(0))
    width, height = right - left, bottom - top
    assert (width, height) == ((53, 40) if size[0] > size[1] else (40, 53))
    assert abs(left - (size[0] - right)) <= 1 and abs(top - (size[1] - bottom)) <= 1


def test_random_box_is_by_default_that_of_open_clip():
    defaults = open_clip.transform.AugmentationCfg()
    assert (AREA, RATIO) == (defaults.scale, defaults.ratio or (3 / 4, 4 / 3))


@pytest.mark.parametrize("area", [AREA, (0.08, 1.0)], ids=str)
@pytest.mark.parametrize("size", [(64, 64), (256, 256), (500, 375), (100, 80)], ids=str)
def test_boxes_are_distributed_as_torchvision_draws_them(size, area, monkeypatch):
    from torchvision.transforms import RandomResizedCrop

    monkeypatch.setattr(loader, "AREA", area)
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


def test_half_of_the_images_are_flipped(encode):
    pixels = np.zeros((12, 12, 3), np.uint8)
    pixels[:, 6:] = 255
    data, count = encode(pixels), 2000
    left, right = (slice(0, 3), slice(-3, None))
    decoded = [decode_image(data, 12, words(sample)) for sample in range(count)]
    flipped = np.array([image[..., left].mean() > image[..., right].mean() for image in decoded])
    assert abs(flipped.mean() - 0.5) < 4 * 0.5 / count**0.5  # 4 standard deviations
    epochs = [[words(s, e)[-1] >> np.uint64(63) for s in range(count)] for e in (0, 1)]
    assert abs(np.corrcoef(epochs)[0, 1]) < 4 / count**0.5


def test_flipped_image_is_the_mirror_of_the_same_box(encode):
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    one, other = words(0), words(0)
    one[-1], other[-1] = 0, np.uint64(1) << np.uint64(63)
    plain, mirrored = (decode_image(encode(pixels), 12, choice) for choice in (one, other))
    np.testing.assert_array_equal(plain, mirrored[:, :, ::-1])
    assert (plain != mirrored).any()


@pytest.mark.parametrize("shape", [(12, 12), (20, 30), (30, 20), (1, 1), (1, 30)], ids=str)
def test_augmented_image_is_the_random_box_resized_bicubically(shape, encode):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    chosen = words(3)
    chosen[-1] = 0
    box = random_box(shape[1], shape[0], chosen)
    expected = Image.fromarray(pixels).resize((12, 12), Image.Resampling.BICUBIC, box)
    decoded = decode_image(encode(pixels), 12, chosen)
    np.testing.assert_array_equal(decoded, np.asarray(expected).transpose(2, 0, 1))
