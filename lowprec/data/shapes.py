"""`shapes`: a procedural image-text data set for CLIP training without a download.

A picture shows one to four copies of an object, or one object in a spatial relation to a second
one; its caption is true. The class is the color and shape of the subject.

A training image is a pure function of (seed, index). The validation set is the first `num_val`
scenes of its own random stream, without those whose content repeats an earlier one: each caption
is true of exactly one picture, so retrieval can reach 100%. With `swapped`, every validation scene
of two objects is followed by the same scene with their colors exchanged, whose caption has the same
words: only a model that binds colors to objects tells the two apart.
"""

import io
import itertools
import os
import tarfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lowprec.data import shapes_drawing as drawing
from lowprec.data.jobs import num_cores, run_jobs
from lowprec.runs import durable

CLASSES = tuple((color, shape) for color in drawing.COLORS for shape in drawing.OUTLINES)
CLASSNAMES = tuple(f"{color} {shape}" for color, shape in CLASSES)
SPLITS = ("train", "val")
SAMPLES_PER_SHARD = 2000
NUM_TRAIN = 20000  # training pairs by default
NUM_DRAWS = 48  # random numbers per image; a scene and its caption take at most 41

SIZES = {"small": (0.21, 0.27), "medium": (0.34, 0.41), "large": (0.52, 0.62)}
SIZE_WORDS = {"small": ("small", "little"), "medium": ("",), "large": ("large", "big")}
MAX_TILT = 12.0  # degrees: a square must not become a diamond
MAX_SHADE = 10  # largest deviation of a channel from the named color
REACH = 0.61  # half the extent of a tilted square with side 1 (0.593), plus a margin

COUNT_WORDS = {1: ("a", "a", "one", "a single"), 2: ("two",), 3: ("three",), 4: ("four",)}
PLURALS = {"cross": "crosses", "fish": "fish", "hourglass": "hourglasses"}
TEXTURE_WORDS = {
    "solid": ("", "", "", "solid"),
    "striped": ("striped",),
    "dotted": ("dotted", "spotted"),
    "checkered": ("checkered",),
}
RELATIONS = {
    "left": ("to the left of", "on the left of", "left of"),
    "right": ("to the right of", "on the right of", "right of"),
    "above": ("above", "higher than"),
    "below": ("below", "under", "beneath"),
    "inside": ("inside", "within", "in front of"),
}
GRADIENTS = ("a background fading from {} to {}", "a {} to {} gradient")
SENTENCES = (
    "{subject}",
    "a picture of {subject}",
    "a drawing of {subject}",
    "{subject} on {background}",
    "{subject} on {background}",
    "{subject} against {background}",
    "a picture of {subject} on {background}",
    "an image of {subject} on {background}",
    "a scene with {subject} on {background}",
    "{background} with {subject}",
)
# Zero-shot prompts: captions of the grammar above that cover sizes, textures, relations and
# backgrounds. None has a bare "a {}", which would not fit orange.
TEMPLATES = tuple(Path(__file__).with_name("shapes_templates.txt").read_text().splitlines())


def render_shapes(
    out: Path,
    *,
    num_train: int = NUM_TRAIN,
    num_val: int = 5000,
    swapped: bool = False,
    image_size: int = 64,
    seed: int = 0,
) -> None:
    """Writes the data set: `out/train-0000.tar`, ..., `out/val-0000.tar`, ..., names and prompts.

    Shards are in webdataset's layout, KEY.jpg (RGB), KEY.txt (caption) and KEY.cls (class index),
    and are renamed into place when complete. Line n of classnames.txt, from 0, names class n;
    templates.txt holds one prompt a line with {} for the class name. A smaller set is the beginning
    of a larger one. The bytes do not depend on the number of cores; another build of Pillow's
    libjpeg may encode the same pixels differently. Raises ValueError if `out` holds shards of a
    larger data set.
    """
    scenes = {
        "train": [(index, False) for index in range(num_train)],
        "val": distinct_scenes(seed, "val", num_val, swapped),
    }
    jobs = [
        (out / f"{split}-{shard:04d}.tar", split, scenes[split][first:][:SAMPLES_PER_SHARD])
        for split in SPLITS
        for shard, first in enumerate(range(0, len(scenes[split]), SAMPLES_PER_SHARD))
    ]
    paths = {path for path, _, _ in jobs}
    stale = {path for split in SPLITS for path in out.glob(f"{split}-*.tar")} - paths
    if stale:
        raise ValueError(f"{out} holds {min(stale).name}, which does not belong to this data set.")
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in (("classnames.txt", CLASSNAMES), ("templates.txt", TEMPLATES)):
        durable.replace(out / name, "".join(f"{line}\n" for line in lines).encode())
    write = partial(_write_shard, image_size=image_size, seed=seed)
    try:
        run_jobs(write, jobs, num_cores(), f"rendering {out}")
    finally:
        for left in out.glob("*.tar.partial"):
            left.unlink(missing_ok=True)


def _write_shard(job: tuple[Path, str, list], *, image_size: int, seed: int) -> None:
    """Renders scenes, given as (index, swapped), into one tar file."""
    path, split, scenes = job
    unfinished = path.with_name(path.name + ".partial")
    try:
        with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as tar:
            for index, swapped in scenes:
                scene = make_scene(seed, split, index, swapped)
                jpeg = io.BytesIO()
                # Full chroma: halving it smears the colors of small objects.
                drawing.draw_scene(scene, image_size).save(jpeg, "JPEG", quality=90, subsampling=0)
                for suffix, data in (
                    ("jpg", jpeg.getvalue()),
                    ("txt", scene.caption.encode()),
                    ("cls", str(class_of(scene)).encode()),
                ):
                    key = f"{split[0]}{index:07d}{'s' if swapped else ''}"
                    member = tarfile.TarInfo(f"{key}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        os.replace(unfinished, path)
    except OSError as error:
        raise durable.DiskError(unfinished, error) from error


def distinct_scenes(seed: int, split: str, count: int, swapped: bool) -> list[tuple[int, bool]]:
    """(index, swapped) of the first `count` scenes whose content repeats no earlier one's.

    With `swapped`, a scene of two objects is followed by the one with their colors exchanged.
    """
    scenes: list[tuple[int, bool]] = []
    contents = set()
    for index in itertools.count():
        for exchange in (False, True) if swapped else (False,):
            if len(scenes) == count:
                return scenes
            scene = make_scene(seed, split, index, exchange)
            if content(scene) not in contents:
                contents.add(content(scene))
                scenes.append((index, exchange))


def content(scene: drawing.Scene) -> tuple:
    """What every caption of a scene describes: all but the background, which some leave out."""
    subject, second = scene.subject, scene.second
    size = next(name for name, (_, most) in SIZES.items() if subject.places[0].size <= most)
    look = (subject.color, subject.shape, subject.texture, len(subject.places), size)
    return *look, scene.relation, second and (second.color, second.shape)


def class_of(scene: drawing.Scene) -> int:
    """The scene's class as an index into `CLASSNAMES`."""
    return CLASSES.index((scene.subject.color, scene.subject.shape))


class Dice:
    """Random choices that are a pure function of (seed, split, index)."""

    def __init__(self, seed: int, split: str, index: int):
        key = np.array([seed, SPLITS.index(split)], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=[0, index, 0, 0]).random_raw(NUM_DRAWS)
        self._draws = iter(((words >> np.uint64(11)) * 2.0**-53).tolist())

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * next(self._draws)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return next(self._draws) < probability

    def pick(self, options: Sequence) -> Any:
        """One of the options, all equally likely."""
        return options[int(next(self._draws) * len(options))]

    def sample(self, options: Iterable, count: int) -> list:
        """`count` different options in random order."""
        rest = list(options)
        return [rest.pop(int(next(self._draws) * len(rest))) for _ in range(count)]


def make_scene(seed: int, split: str, index: int, swapped: bool = False) -> drawing.Scene:
    """Decides what a picture contains and what its caption says, without drawing it.

    `swapped` exchanges the colors of two objects; everything else stays.
    """
    dice = Dice(seed, split, index)
    color, shape = dice.pick(CLASSES)
    relation = dice.pick(tuple(RELATIONS)) if dice.chance(0.4) else None
    if relation is None:
        count = 1 if dice.chance(0.5) else dice.pick((2, 3, 4))
        size = dice.pick(tuple(SIZES) if count == 1 else ("small", "medium"))
        places, second = _scatter(dice, count, size), None
    else:
        size = dice.pick(("small", "medium") if relation == "inside" else ("medium", "large"))
        places, second_place = _relate(dice, relation, size)
        others = ("circle", "square") if relation == "inside" else tuple(drawing.OUTLINES)
        second_shape = dice.pick([other for other in others if other != shape])
        second_color = dice.pick(drawing.colors_beside(color))
        if swapped:
            color, second_color = second_color, color
        second = drawing.Item(second_shape, second_color, "solid", _shade(dice), (second_place,))
    # A pattern on a small object would be finer than the pixels of a small picture.
    texture = "solid" if size == "small" else dice.pick(drawing.TEXTURES)
    subject = drawing.Item(shape, color, texture, _shade(dice), places)
    background = _choose_background(dice, tuple(i.color for i in (subject, second) if i))
    scene = drawing.Scene(subject, relation, second, background, caption="")
    return scene._replace(caption=_describe(dice, scene, size))


def _shade(dice: Dice) -> tuple[int, int, int]:
    return tuple(round(dice.between(-MAX_SHADE, MAX_SHADE)) for _ in range(3))


def _choose_background(dice: Dice, colors: tuple[str, ...]) -> drawing.Background:
    """A background that contrasts with all `colors`, all along a gradient."""
    style = dice.pick(("plain", "plain", "gradient", "gradient", *drawing.TEXTURES[1:]))
    plains, gradients = drawing.backgrounds_for(colors)
    if style == "gradient" and not gradients:
        style = "plain"
    background_colors = dice.pick(gradients if style == "gradient" else plains)
    return drawing.Background(style, background_colors, dice.pick(range(4)))


def _place(dice: Dice, x: float, y: float, size: float) -> drawing.Placement:
    return drawing.Placement(x, y, size, dice.between(-MAX_TILT, MAX_TILT), dice.chance(0.5))


def _scatter(dice: Dice, count: int, size: str) -> tuple[drawing.Placement, ...]:
    """Places copies of an object in different cells of a grid; a single one goes anywhere."""
    low, high = SIZES[size]
    grid = 1 if count == 1 else 3 if size == "small" and dice.chance(0.5) else 2
    side = dice.between(low, high)
    play = max(0.0, 0.5 / grid - REACH * side)
    return tuple(
        _place(
            dice,
            (cell % grid + 0.5) / grid + dice.between(-play, play),
            (cell // grid + 0.5) / grid + dice.between(-play, play),
            side,
        )
        for cell in dice.sample(range(grid**2), count)
    )


def _relate(
    dice: Dice, relation: str, size: str
) -> tuple[tuple[drawing.Placement, ...], drawing.Placement]:
    """Places the subject and the second object, which is small unless it surrounds the subject."""
    side = dice.between(SIZES[size][0], min(SIZES[size][1], 0.56))
    if relation == "inside":
        around = dice.between(0.8, 0.86)
        x, y = dice.between(0.49, 0.51), dice.between(0.49, 0.51)
        return (_place(dice, x, y, side),), _place(dice, 0.5, 0.5, around)
    second_side = dice.between(0.20, 0.24)
    reach, second_reach = REACH * side, REACH * second_side
    # Along the axis of the relation, the free length is divided into before, between and after.
    free = 1 - 2 * (reach + second_reach)
    before = dice.between(0, free / 2)
    gap = dice.between(0, free / 2)
    along = before + reach
    second_along = along + reach + gap + second_reach
    across = dice.between(max(0.4, reach), min(0.6, 1 - reach))
    second_across = across + dice.between(-0.12, 0.12)
    if relation in ("right", "below"):
        along, second_along = 1 - along, 1 - second_along
    if relation in ("left", "right"):
        first, second = (along, across), (second_along, second_across)
    else:
        first, second = (across, along), (second_across, second_along)
    return (_place(dice, *first, side),), _place(dice, *second, second_side)


def _describe(dice: Dice, scene: drawing.Scene, size: str) -> str:
    """A caption in varying words; some leave out the background."""
    subject = _noun_phrase(dice, scene.subject, dice.pick(SIZE_WORDS[size]))
    if scene.second is not None:
        second_size = dice.pick(("", "large" if scene.relation == "inside" else "small"))
        relation_words = dice.pick(RELATIONS[scene.relation])
        subject += f" {relation_words} {_noun_phrase(dice, scene.second, second_size)}"
    style, colors, _ = scene.background
    if style == "gradient":
        background = dice.pick(GRADIENTS).format(*colors)
    else:
        background = f"a {'' if style == 'plain' else style + ' '}{colors[0]} background"
    sentence = dice.pick(SENTENCES).format(subject=subject, background=background)
    return sentence + dice.pick(("", "."))


def _noun_phrase(dice: Dice, item: drawing.Item, size_word: str) -> str:
    """A phrase like "three small red stars": count, size, texture, color and shape."""
    count = len(item.places)
    noun = item.shape if count == 1 else PLURALS.get(item.shape, item.shape + "s")
    look = [dice.pick(TEXTURE_WORDS[item.texture]), item.color]
    if item.texture != "solid" and dice.chance(0.5):  # "green striped", but never "green solid"
        look.reverse()
    words = " ".join(word for word in (size_word, *look, noun) if word)
    count_word = dice.pick(COUNT_WORDS[count])
    return f"{'an' if count_word == 'a' and words[0] in 'aeiou' else count_word} {words}"
