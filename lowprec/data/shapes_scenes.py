"""What is on a picture of `shapes` and what is said about it, decided without drawing."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from lowprec.data.shapes_drawing import (
    COLORS,
    TEXTURES,
    Background,
    Item,
    Placement,
    Scene,
    backgrounds_for,
    colors_beside,
)
from lowprec.data.shapes_outlines import OUTLINES

T = TypeVar("T")

CLASSES = tuple((color, shape) for color in COLORS for shape in OUTLINES)
CLASSNAMES = tuple(f"{color} {shape}" for color, shape in CLASSES)
SPLITS = ("train", "val")
NUM_DRAWS = 48  # random numbers of an image; a scene and its caption take at most 41

SIZES = {"small": (0.21, 0.27), "medium": (0.34, 0.41), "large": (0.52, 0.62)}
SIZE_WORDS = {"small": ("small", "little"), "medium": ("",), "large": ("large", "big")}
MAX_TILT = 12.0  # degrees: a square must not become a diamond
MAX_SHADE = 10  # how far a channel strays from its named color
REACH = 0.61  # half the extent of a tilted square of side 1 (0.593), and a little air

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


class Dice:
    """Random choices that are a pure function of (seed, split, index)."""

    def __init__(self, seed: int, split: str, index: int):
        key = np.array([seed, SPLITS.index(split)], dtype=np.uint64)
        stream = np.random.Philox(key=key, counter=[0, index, 0, 0])
        uniform = (stream.random_raw(NUM_DRAWS) >> np.uint64(11)) * 2.0**-53
        self._draws = iter(uniform.tolist())

    def between(self, low: float, high: float) -> float:
        """A number in [low, high)."""
        return low + (high - low) * next(self._draws)

    def chance(self, probability: float) -> bool:
        """True this often."""
        return next(self._draws) < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, all equally likely."""
        return options[int(next(self._draws) * len(options))]

    def sample(self, options: Iterable[T], count: int) -> list[T]:
        """`count` different options in random order."""
        rest = list(options)
        return [rest.pop(int(next(self._draws) * len(rest))) for _ in range(count)]


def make_scene(seed: int, split: str, index: int) -> Scene:
    """Decide what is on a picture and what is said about it, without drawing it."""
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
        others = ("circle", "square") if relation == "inside" else tuple(OUTLINES)
        second_shape = dice.pick([other for other in others if other != shape])
        second_color = dice.pick(colors_beside(color))
        second = Item(second_shape, second_color, "solid", _shade(dice), (second_place,))
    # A pattern on a small object would be finer than the pixels of a small picture.
    texture = "solid" if size == "small" else dice.pick(TEXTURES)
    subject = Item(shape, color, texture, _shade(dice), places)
    background = _choose_background(dice, tuple(i.color for i in (subject, second) if i))
    scene = Scene(subject, relation, second, background, caption="")
    return scene._replace(caption=_describe(dice, scene, size))


def class_of(scene: Scene) -> int:
    """The scene's class as an index into `CLASSNAMES`."""
    return CLASSES.index((scene.subject.color, scene.subject.shape))


def _shade(dice: Dice) -> tuple[int, int, int]:
    return tuple(round(dice.between(-MAX_SHADE, MAX_SHADE)) for _ in range(3))


def _choose_background(dice: Dice, colors: tuple[str, ...]) -> Background:
    """A background that all these colors stand out from, all the way along a gradient."""
    style = dice.pick(("plain", "plain", "gradient", "gradient", *TEXTURES[1:]))
    plains, gradients = backgrounds_for(colors)
    if style == "gradient" and not gradients:
        style = "plain"
    shown = dice.pick(gradients if style == "gradient" else plains)
    return Background(style, shown, dice.pick(range(4)))


def _place(dice: Dice, x: float, y: float, size: float) -> Placement:
    return Placement(x, y, size, dice.between(-MAX_TILT, MAX_TILT), dice.chance(0.5))


def _scatter(dice: Dice, count: int, size: str) -> tuple[Placement, ...]:
    """Like objects in different cells of a grid, hence apart; one alone goes anywhere."""
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


def _relate(dice: Dice, relation: str, size: str) -> tuple[tuple[Placement, ...], Placement]:
    """Places of the subject and of the second object, which is a small one unless around it."""
    side = dice.between(SIZES[size][0], min(SIZES[size][1], 0.56))
    if relation == "inside":
        around = dice.between(0.8, 0.86)
        x, y = dice.between(0.49, 0.51), dice.between(0.49, 0.51)
        return (_place(dice, x, y, side),), _place(dice, 0.5, 0.5, around)
    second_side = dice.between(0.20, 0.24)
    reach, second_reach = REACH * side, REACH * second_side
    # Along the axis of the relation the free length is shared out before, between and after.
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


def _describe(dice: Dice, scene: Scene, size: str) -> str:
    """A caption; the wording varies, and now and then leaves out what is true as well."""
    said = _noun_phrase(dice, scene.subject, dice.pick(SIZE_WORDS[size]))
    if scene.second is not None:
        second_size = dice.pick(("", "large" if scene.relation == "inside" else "small"))
        relation_words = dice.pick(RELATIONS[scene.relation])
        said += f" {relation_words} {_noun_phrase(dice, scene.second, second_size)}"
    style, colors, _ = scene.background
    if style == "gradient":
        behind = dice.pick(GRADIENTS).format(*colors)
    else:
        behind = f"a {'' if style == 'plain' else style + ' '}{colors[0]} background"
    sentence = dice.pick(SENTENCES).format(subject=said, background=behind)
    return sentence + dice.pick(("", "."))


def _noun_phrase(dice: Dice, item: Item, size_word: str) -> str:
    """Like "three small red stars": count, size, texture, color and shape, as far as worth it."""
    count = len(item.places)
    noun = item.shape if count == 1 else PLURALS.get(item.shape, item.shape + "s")
    look = [dice.pick(TEXTURE_WORDS[item.texture]), item.color]
    if item.texture != "solid" and dice.chance(0.5):  # "green striped", but never "green solid"
        look.reverse()
    words = " ".join(word for word in (size_word, *look, noun) if word)
    counted = dice.pick(COUNT_WORDS[count])
    return f"{'an' if counted == 'a' and words[0] in 'aeiou' else counted} {words}"
