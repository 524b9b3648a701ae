"""How the scenes of `shapes` look: outlines, palettes, textures, and `draw_scene`.

Lengths are fractions of the image's side, so a scene can be drawn at any size; x grows to the
right and y downward. What is drawn, and what is said about it, is decided in
`shapes_scenes`.
"""

from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw

from lowprec.data.shapes_outlines import OUTLINES

Color = tuple[int, int, int]

COLORS: dict[str, Color] = {
    "red": (214, 28, 36),
    "orange": (250, 132, 12),
    "yellow": (252, 218, 36),
    "green": (36, 152, 56),
    "cyan": (32, 200, 216),
    "blue": (32, 72, 216),
    "purple": (124, 40, 172),
    "pink": (250, 124, 188),
    "brown": (116, 66, 28),
    "white": (248, 248, 248),
    "black": (22, 22, 24),
    "gray": (132, 134, 138),
}
BACKGROUNDS: dict[str, Color] = {
    "white": (250, 250, 248),
    "black": (16, 16, 20),
    "light gray": (206, 209, 213),
    "dark gray": (66, 68, 74),
    "light blue": (172, 212, 246),
    "dark blue": (20, 30, 96),
    "light green": (188, 232, 182),
    "dark green": (16, 70, 42),
    "light yellow": (253, 244, 176),
    "beige": (233, 219, 192),
    "lavender": (208, 194, 242),
    "dark purple": (58, 20, 88),
    "light pink": (252, 212, 224),
    "dark red": (108, 14, 26),
    "teal": (4, 104, 110),
    "peach": (255, 208, 172),
}
TEXTURES = ("solid", "striped", "dotted", "checkered")
SUPERSAMPLING = 2
MIN_CONTRAST = 220.0  # least `color_distance` of two things that touch; white to black is 765


class Placement(NamedTuple):
    """Where one copy of an item is: its center, longer side, tilt in degrees and mirroring."""

    x: float
    y: float
    size: float
    tilt: float
    mirrored: bool


class Item(NamedTuple):
    """One kind of object, drawn once per placement; `shade` is added to its named color."""

    shape: str
    color: str
    texture: str
    shade: Color
    places: tuple[Placement, ...]


class Background(NamedTuple):
    """A `plain` background, a `gradient` from its first to its last color, or a texture.

    `turns` counts the quarter turns of a gradient, or of a texture's stripes.
    """

    style: str
    colors: tuple[str, ...]
    turns: int


class Scene(NamedTuple):
    """A picture's content, and a caption. The subject is drawn last: in front of the second."""

    subject: Item
    relation: str | None
    second: Item | None
    background: Background
    caption: str


def color_distance(a: Color, b: Color) -> float:
    """Perceived distance of two colors, 0 to 765: the "redmean" weighting of RGB differences."""
    red = (a[0] + b[0]) / 2 / 256
    weights = (2 + red, 4, 3 - red)
    return sum(w * (x - y) ** 2 for w, x, y in zip(weights, a, b, strict=True)) ** 0.5


@cache
def colors_beside(color: str) -> tuple[str, ...]:
    """The colors that contrast with this one."""
    own = COLORS[color]
    return tuple(c for c in COLORS if color_distance(own, COLORS[c]) >= MIN_CONTRAST)


@cache
def backgrounds_for(colors: tuple[str, ...]) -> tuple[tuple, tuple]:
    """The plain backgrounds (name,) and gradients (first, last) that all colors stand out from."""
    pairs = [
        pair for pair in product(BACKGROUNDS, repeat=2) if all(pair in _clear(c) for c in colors)
    ]
    plains = tuple((first,) for first, last in pairs if first == last)
    return plains, tuple(pair for pair in pairs if pair[0] != pair[1])


@cache
def _clear(color: str) -> frozenset[tuple[str, str]]:
    """The pairs of backgrounds with every blend of which this color contrasts."""

    def clear(first: str, last: str) -> bool:
        blends = (_mix(BACKGROUNDS[first], BACKGROUNDS[last], step / 8) for step in range(9))
        return all(color_distance(COLORS[color], blend) >= MIN_CONTRAST for blend in blends)

    return frozenset(pair for pair in product(BACKGROUNDS, repeat=2) if clear(*pair))


def _mix(a: Color, b: Color, share_of_b: float) -> Color:
    return tuple(round(x + (y - x) * share_of_b) for x, y in zip(a, b, strict=True))


def _accent(color: Color, strength: float) -> Color:
    """A color for a pattern on `color`: lighter on a dark color, darker on a light one."""
    is_dark = color_distance(color, (0, 0, 0)) < 480
    return _mix(color, (255, 255, 255) if is_dark else (0, 0, 0), strength)


@lru_cache(maxsize=64)
def _texture_mask(texture: str, period: int, turns: int, side: int) -> Image.Image:
    """Where a texture's accent goes: mode L, 0 or 255, (side, side), repeating each `period`."""
    y, x = np.mgrid[:side, :side]
    u, v = x % period / period, y % period / period
    if texture == "striped":
        phase = (u, (u + v) % 1, v, (u - v) % 1)[turns]
        mask = phase < 0.4
    elif texture == "dotted":
        mask = (u - 0.5) ** 2 + (v - 0.5) ** 2 < 0.36**2
    else:
        mask = (u < 0.5) != (v < 0.5)
    return Image.fromarray(np.uint8(mask) * 255)


@lru_cache(maxsize=4)
def _ramp(turns: int, side: int) -> Image.Image:
    """A linear ramp from 0 to 255, mode L, (side, side), turned by quarter turns."""
    ramp = np.tile(np.linspace(0, 255, side).round().astype(np.uint8), (side, 1))
    return Image.fromarray(np.rot90(ramp, turns).copy())


def _draw_background(background: Background, side: int) -> Image.Image:
    first, last = BACKGROUNDS[background.colors[0]], BACKGROUNDS[background.colors[-1]]
    canvas = Image.new("RGB", (side, side), first)
    if background.style == "gradient":
        canvas.paste(last, mask=_ramp(background.turns, side))
    elif background.style != "plain":
        mask = _texture_mask(background.style, side // 6, background.turns, side)
        canvas.paste(_accent(first, 0.16), mask=mask)
    return canvas


def outline(shape: str, place: Placement, side: int) -> np.ndarray:
    """The polygon of a placed shape in pixels of an image of this side, float64 (n, 2)."""
    tilt = np.radians(place.tilt)
    cos, sin = np.cos(tilt), np.sin(tilt)
    across = -1 if place.mirrored else 1
    turn = np.array([[across * cos, across * sin], [-sin, cos]])
    return OUTLINES[shape] @ (turn * (place.size / 2 * side)) + (place.x * side, place.y * side)


def _draw_item(canvas: Image.Image, draw: ImageDraw.ImageDraw, item: Item) -> None:
    side = canvas.width
    color = tuple(
        min(255, max(0, c + s)) for c, s in zip(COLORS[item.color], item.shade, strict=True)
    )
    for place in item.places:
        points = outline(item.shape, place, side)
        polygon = points.ravel().tolist()
        draw.polygon(polygon, fill=color)
        draw.line(polygon + polygon[:2], fill=color, width=2)  # closes the seam of the ring
        if item.texture == "solid":
            continue
        corner = np.floor(points.min(axis=0)).astype(int)
        width, height = (np.ceil(points.max(axis=0)).astype(int) - corner + 1).tolist()
        mask = Image.new("L", (width, height))
        inked, polygon = ImageDraw.Draw(mask), (points - corner).ravel().tolist()
        inked.polygon(polygon, fill=255)
        # A rim stays free of the accent: it would cut the outline where it is like the background.
        inked.line(polygon + polygon[:2], fill=0, width=max(1, round(place.size * side * 0.05)))
        period = max(2, round(place.size * side / (2.6 if item.texture == "checkered" else 3.6)))
        texture = _texture_mask(item.texture, period, int(place.mirrored), side)
        mask = ImageChops.darker(mask, texture.crop((0, 0, width, height)))
        canvas.paste(_accent(color, 0.62), tuple(corner.tolist()), mask)


def draw_scene(scene: Scene, image_size: int) -> Image.Image:
    """The scene as an RGB image of `image_size` x `image_size` pixels."""
    canvas = _draw_background(scene.background, image_size * SUPERSAMPLING)
    draw = ImageDraw.Draw(canvas)
    if scene.second is not None:
        _draw_item(canvas, draw, scene.second)
    _draw_item(canvas, draw, scene.subject)
    return canvas.reduce(SUPERSAMPLING)
