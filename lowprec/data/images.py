"""From the bytes of an image file to pixels: the central square, or a random crop and flip."""

import io
import math
import warnings

import numpy as np
from PIL import Image, UnidentifiedImageError

BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)
BAD_IMAGE = (OSError, ValueError, SyntaxError, *BOMBS)
warnings.simplefilter("error", Image.DecompressionBombWarning)  # from 89 million pixels: 0.5 GB
CROP_WORDS = 41  # random words that a crop and flip may use
AREA = (0.9, 1.0)  # share of the image in a random crop, open_clip's default
RATIO = (3 / 4, 4 / 3)


def decode_image(data: bytes, size: int, words: np.ndarray | None = None) -> np.ndarray:
    """uint8 [3, size, size]: RGB, resized (bicubic) from the central square or a random box.

    `words`: uint64 [CROP_WORDS] of randomness for `random_box` and a horizontal flip. Raises one of
    BAD_IMAGE where the bytes are no JPEG, WEBP or PNG image, is cut short, or has too many pixels.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "WEBP", "PNG")).convert("RGB")
    except UnidentifiedImageError as error:  # its text holds a memory address
        raise ValueError("not a JPEG, WEBP or PNG image") from error
    except (LookupError, ArithmeticError, TypeError) as error:  # PIL's, of some damaged chunks
        raise ValueError(f"damaged: {type(error).__name__}: {error}") from error
    width, height = image.size
    if words is None:
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        box = (left, top, left + side, top + side)
    else:
        box = random_box(width, height, words)
    if image.size != (size, size) or box != (0, 0, size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box)
    pixels = np.asarray(image)
    if words is not None and words[-1] >> np.uint64(63):
        pixels = pixels[:, ::-1]
    return pixels.transpose(2, 0, 1)


def random_box(width: int, height: int, words: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a random crop of AREA and RATIO; words: uint64 [>= 40].

    Ten tries at a box that fits, then the largest central box within RATIO. Source: torchvision's
    RandomResizedCrop (the algorithm; the randomness is ours).
    """
    draws = (words[:40] >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
    for area, ratio, x, y in draws.reshape(10, 4).tolist():
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        shape = math.exp(math.log(RATIO[0]) + ratio * (math.log(RATIO[1]) - math.log(RATIO[0])))
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
