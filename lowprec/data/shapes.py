"""`shapes`: a procedural image-text data set for trying CLIP training without a download.

A picture shows one to four like objects, or one object and a second one that it stands in a
relation to; the caption is true of it. Its class is the color and the shape of its subject.
An image is a pure function of (seed, split, index): the same arguments give the same bytes
(on one machine: another build of libjpeg may encode the same pixels differently, another NumPy may
draw other noise).
"""

import io
import os
import tarfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lowprec.data.shapes_drawing import draw_scene
from lowprec.data.shapes_scenes import CLASSNAMES, SPLITS, class_of, make_scene

# No bare "a {}": it would not fit orange.
TEMPLATES = (
    "a picture of the {}.",
    "a picture of one {}.",
    "a drawing of a single {}.",
    "a scene with one {}.",
    "an image of the {}.",
    "a small {}.",
    "a large {}.",
    "one {}.",
)
SAMPLES_PER_SHARD = 2000


def render_shapes(
    out: Path,
    *,
    num_train: int = 20000,
    num_val: int = 5000,
    image_size: int = 64,
    seed: int = 0,
    noise: float = 0.0,
    num_processes: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Write the data set: out/train-0000.tar ..., out/val-0000.tar ..., classnames and templates.

    A shard is in webdataset's layout, KEY.jpg (RGB), KEY.txt (caption), KEY.cls (class number),
    and gets its name only when complete. Line n of classnames.txt, from 0, names class n;
    templates.txt holds one prompt a line, with {} for the class name. `noise`: standard deviation,
    in 8-bit levels, of Gaussian noise on every pixel, for files as large as those of photographs.
    The bytes do not depend on `num_processes`; above 1, a script must call this under
    `if __name__ == "__main__"`. `on_progress` is told the number of images of each shard as it is
    done.

    Raises:
        ValueError: An argument is out of range, or `out` holds shards of a larger data set.
    """
    for name, value, least in (
        ("num_train", num_train, 1),
        ("num_val", num_val, 0),
        ("image_size", image_size, 16),
        ("seed", seed, 0),
        ("noise", noise, 0),
        ("num_processes", num_processes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    if seed >= 2**64:
        raise ValueError(f"seed must be less than 2**64, got {seed}.")
    jobs = [
        (out / f"{split}-{n:04d}.tar", split, range(num)[i:][:SAMPLES_PER_SHARD])
        for split, num in zip(SPLITS, (num_train, num_val), strict=True)
        for n, i in enumerate(range(0, num, SAMPLES_PER_SHARD))
    ]
    stale = {path for split in SPLITS for path in out.glob(f"{split}-*.tar")} - {j[0] for j in jobs}
    if stale:
        raise ValueError(f"{out} holds {min(stale).name}, which is not of this data set.")
    out.mkdir(parents=True, exist_ok=True)
    (out / "classnames.txt").write_text("".join(name + "\n" for name in CLASSNAMES))
    (out / "templates.txt").write_text("".join(template + "\n" for template in TEMPLATES))
    report = on_progress or (lambda count: None)
    write = partial(_write_shard, image_size=image_size, seed=seed, noise=noise)
    if num_processes == 1:
        for job in jobs:
            report(write(job))
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for count in pool.map(write, jobs):
            report(count)


def _write_shard(job: tuple[Path, str, range], *, image_size: int, seed: int, noise: float) -> int:
    """Render the samples of these indices into one tar file; returns their number."""
    path, split, indices = job
    unfinished = path.with_name(path.name + ".partial")
    with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as tar:
        for index in indices:
            scene = make_scene(seed, split, index)
            image = draw_scene(scene, image_size)
            if noise:
                image = _add_noise(image, noise, seed, split, index)
            jpeg = io.BytesIO()
            # Full chroma: halving it smears the colors of small objects.
            image.save(jpeg, "JPEG", quality=90, subsampling=0)
            for suffix, data in (
                ("jpg", jpeg.getvalue()),
                ("txt", scene.caption.encode()),
                ("cls", str(class_of(scene)).encode()),
            ):
                member = tarfile.TarInfo(f"{split[0]}{index:07d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    os.replace(unfinished, path)
    return len(indices)


def _add_noise(image: Image.Image, noise: float, seed: int, split: str, index: int) -> Image.Image:
    """The image with Gaussian noise on every pixel, a pure function of (seed, split, index)."""
    key = np.array([seed, SPLITS.index(split)], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=[0, index, 1, 0])  # a scene's words have 0 for the 1
    pixels = np.asarray(image, dtype=np.float32)
    levels = np.random.Generator(words).standard_normal(pixels.shape, dtype=np.float32)
    pixels = pixels + np.float32(noise) * levels
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


def contact_sheet(
    path: Path, *, columns: int = 6, rows: int = 4, tile: int = 128, seed: int = 0
) -> None:
    """Save the first scenes of a seed's training split with their captions, as one picture."""
    margin = 12
    width, height = tile + margin, tile + 96
    sheet = Image.new("RGB", (columns * width + margin, rows * height + margin), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    for index in range(columns * rows):
        scene = make_scene(seed, "train", index)
        x, y = margin + index % columns * width, margin + index // columns * height
        sheet.paste(draw_scene(scene, tile), (x, y))
        draw.rectangle((x - 1, y - 1, x + tile, y + tile), outline="lightgray")
        caption = textwrap.fill(scene.caption, tile // 6)
        draw.multiline_text((x, y + tile + 3), caption, "black", font, spacing=2)
    sheet.save(path, optimize=True)
