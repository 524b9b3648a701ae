"""Draws the scenes of `shapes`: outlines, palettes, textures and `draw_scene`.

Lengths are fractions of the image's side, so a scene can be drawn at any size; x grows to the
right and y downward. `shapes.py` decides what a scene contains and what its caption says.
"""

from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageDraw

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
MIN_CONTRAST = 220.0  # least `color_distance` between things that touch; white to black is 765


class Placement(NamedTuple):
    """Position of one copy of an item: center, longer side, tilt in degrees, mirrored or not."""

    x: float
    y: float
    size: float
    tilt: float
    mirrored: bool


class Item(NamedTuple):
    """One kind of object, drawn once per placement; `shade` is added to the RGB of `color`."""

    shape: str
    color: str
    texture: str
    shade: Color
    places: tuple[Placement, ...]


class Background(NamedTuple):
    """A `plain` background, a `gradient` from the first to the last color, or a texture.

    `turns` counts quarter turns of a gradient, or the direction of stripes.
    """

    style: str
    colors: tuple[str, ...]
    turns: int


class Scene(NamedTuple):
    """The content of a picture and its caption. The subject is drawn in front of `second`."""

    subject: Item
    relation: str | None
    second: Item | None
    background: Background
    caption: str


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> np.ndarray:
    """Points on an elliptic arc, float64 [n, 2]; angles in degrees, clockwise from the right."""
    angles = np.radians(np.linspace(start, stop, 2 + int(abs(stop - start) / 10)))
    return np.stack([x + rx * np.cos(angles), y + ry * np.sin(angles)], axis=1)


def _polar(radii: np.ndarray) -> np.ndarray:
    """Closed outline with the given radii at evenly spaced angles; the first points up."""
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return radii[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def _build_outlines() -> dict[str, np.ndarray]:
    """Each shape as a closed polygon, float64 [n, 2]; bounding box centered, longer side 2."""
    petals = 0.68 + 0.32 * np.cos(np.linspace(0, 10 * np.pi, 80, endpoint=False))
    tear = _arc(0, 0.35, 0.65, 0.65, -35, 215)
    t = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    heart = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    cloud = [
        _arc(-0.65, 0.22, 0.35, 0.3, 90, 270),
        _arc(-0.2, -0.16, 0.4, 0.44, 170, 325),
        _arc(0.35, 0.0, 0.3, 0.3, 230, 350),
        _arc(0.7, 0.26, 0.3, 0.26, 270, 450),
    ]
    outlines = {
        "circle": _arc(0, 0, 1, 1, 0, 360),
        "square": [(-1, -1), (1, -1), (1, 1), (-1, 1)],
        "triangle": [(0, -0.9), (1, 0.9), (-1, 0.9)],
        "diamond": [(0, -1), (0.72, 0), (0, 1), (-0.72, 0)],
        "star": _polar(np.tile([1.0, 0.42], 5)),
        "heart": np.stack([16 * np.sin(t) ** 3, -heart], axis=1),
        "cross": [(-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)]
        + [(0.33, 1), (-0.33, 1), (-0.33, 0.33), (-1, 0.33), (-1, -0.33), (-0.33, -0.33)],
        "ring": np.concatenate([_arc(0, 0, 1, 1, 0, 360), _arc(0, 0, 0.54, 0.54, 360, 0)]),
        "crescent": np.concatenate(
            [_arc(0, 0, 1, 1, 50, 310), _arc(0.46, 0, 0.785, 0.785, 282, 78)]
        ),
        "arrow": [(-1, -0.27), (0.1, -0.27), (0.1, -0.75), (1, 0), (0.1, 0.75), (0.1, 0.27)]
        + [(-1, 0.27)],
        "semicircle": _arc(0, 0, 1, 1, 180, 360),
        "teardrop": np.concatenate([[(0, -1)], tear]),
        "flower": _polar(petals),
        "house": [(0, -1), (0.45, -0.55), (0.45, -0.9), (0.7, -0.9), (0.7, -0.3), (1, 0)]
        + [(0.75, 0), (0.75, 1), (0.2, 1), (0.2, 0.4), (-0.2, 0.4), (-0.2, 1), (-0.75, 1)]
        + [(-0.75, 0), (-1, 0)],
        "tree": [(0, -1), (0.55, -0.2), (0.3, -0.2), (0.8, 0.6), (0.18, 0.6), (0.18, 1)]
        + [(-0.18, 1), (-0.18, 0.6), (-0.8, 0.6), (-0.3, -0.2), (-0.55, -0.2)],
        "fish": np.concatenate(
            [_arc(-0.25, 0, 0.75, 0.5, 25, 335), [(1, -0.6), (0.78, 0), (1, 0.6)]]
        ),
        "cloud": np.concatenate(cloud),
        "crown": [(-1, -0.6), (-0.5, 0.0), (0, -0.8), (0.5, 0.0), (1, -0.6), (0.8, 0.75)]
        + [(-0.8, 0.75)],
        "hourglass": [(-0.75, -1), (0.75, -1), (0.12, 0), (0.75, 1), (-0.75, 1), (-0.12, 0)],
        "mushroom": np.concatenate(
            [_arc(0, 0.05, 1, 0.95, 180, 360), [(0.32, 0.05), (0.4, 1), (-0.4, 1), (-0.32, 0.05)]]
        ),
    }
    return {shape: _centered(np.asarray(points)) for shape, points in outlines.items()}


def _centered(points: np.ndarray) -> np.ndarray:
    low, high = points.min(axis=0), points.max(axis=0)
    return (points - (low + high) / 2) / ((high - low).max() / 2)


OUTLINES = _build_outlines()


def color_distance(a: Color, b: Color) -> float:
    """Perceived distance between two colors, 0 to 765: RGB differences with "redmean" weights."""
    red = (a[0] + b[0]) / 2 / 256
    weights = (2 + red, 4, 3 - red)
    return sum(w * (x - y) ** 2 for w, x, y in zip(weights, a, b, strict=True)) ** 0.5


@cache
def colors_beside(color: str) -> tuple[str, ...]:
    """Names of the colors that contrast with `color`."""
    own = COLORS[color]
    return tuple(c for c in COLORS if color_distance(own, COLORS[c]) >= MIN_CONTRAST)


@cache
def backgrounds_for(colors: tuple[str, ...]) -> tuple[tuple, tuple]:
    """Plain backgrounds (name,) and gradients (first, last) that contrast with all `colors`."""
    pairs = product(BACKGROUNDS, repeat=2)
    pairs = [pair for pair in pairs if all(pair in _contrasting(c) for c in colors)]
    plains = tuple((first,) for first, last in pairs if first == last)
    return plains, tuple(pair for pair in pairs if pair[0] != pair[1])


@cache
def _contrasting(color: str) -> frozenset[tuple[str, str]]:
    """Pairs of backgrounds for which `color` contrasts with each blend of the two."""

    def contrasts(first: str, last: str) -> bool:
        blends = (_mix(BACKGROUNDS[first], BACKGROUNDS[last], step / 8) for step in range(9))
        return all(color_distance(COLORS[color], blend) >= MIN_CONTRAST for blend in blends)

    return frozenset(pair for pair in product(BACKGROUNDS, repeat=2) if contrasts(*pair))


def _mix(a: Color, b: Color, share_of_b: float) -> Color:
    return tuple(round(x + (y - x) * share_of_b) for x, y in zip(a, b, strict=True))


def _accent(color: Color, strength: float) -> Color:
    """The color of a pattern on `color`: lighter on dark colors, darker on light ones."""
    is_dark = color_distance(color, (0, 0, 0)) < 480
    return _mix(color, (255, 255, 255) if is_dark else (0, 0, 0), strength)


@lru_cache(maxsize=64)
def _texture_mask(texture: str, period: int, turns: int, side: int) -> Image.Image:
    """Mask of a texture's accent: mode L, 0 or 255, side x side, with a period in pixels."""
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


def _draw_background(background: Background, side: int) -> Image.Image:
    first, last = BACKGROUNDS[background.colors[0]], BACKGROUNDS[background.colors[-1]]
    canvas = Image.new("RGB", (side, side), first)
    if background.style == "gradient":
        ramp = np.tile(np.linspace(0, 255, side).round().astype(np.uint8), (side, 1))
        canvas.paste(last, mask=Image.fromarray(np.rot90(ramp, background.turns).copy()))
    elif background.style != "plain":
        mask = _texture_mask(background.style, side // 6, background.turns, side)
        canvas.paste(_accent(first, 0.16), mask=mask)
    return canvas


def outline(shape: str, place: Placement, side: int) -> np.ndarray:
    """Polygon of a placed shape in the pixels of an image with this side, float64 [n, 2]."""
    tilt = np.radians(place.tilt)
    cos, sin = np.cos(tilt), np.sin(tilt)
    across = -1 if place.mirrored else 1
    turn = np.array([[across * cos, across * sin], [-sin, cos]])
    return OUTLINES[shape] @ (turn * (place.size / 2 * side)) + (place.x * side, place.y * side)


def _draw_item(canvas: Image.Image, draw: ImageDraw.ImageDraw, item: Item) -> None:
    side = canvas.width
    channels = zip(COLORS[item.color], item.shade, strict=True)
    color = tuple(min(255, max(0, channel + shade)) for channel, shade in channels)
    for place in item.places:
        points = outline(item.shape, place, side)
        polygon = points.ravel().tolist()
        draw.polygon(polygon, fill=color)
        draw.line(polygon + polygon[:2], fill=color, width=2)  # closes the seam in the ring
        if item.texture == "solid":
            continue
        corner = np.floor(points.min(axis=0)).astype(int)
        width, height = (np.ceil(points.max(axis=0)).astype(int) - corner + 1).tolist()
        mask = Image.new("L", (width, height))
        inked, polygon = ImageDraw.Draw(mask), (points - corner).ravel().tolist()
        inked.polygon(polygon, fill=255)
        # Keep the accent off the rim: it would break the outline where it resembles the background.
        inked.line(polygon + polygon[:2], fill=0, width=max(1, round(place.size * side * 0.05)))
        period = max(2, round(place.size * side / (2.6 if item.texture == "checkered" else 3.6)))
        texture = _texture_mask(item.texture, period, int(place.mirrored), side)
        mask = ImageChops.darker(mask, texture.crop((0, 0, width, height)))
        canvas.paste(_accent(color, 0.62), tuple(corner.tolist()), mask)


def draw_scene(scene: Scene, image_size: int) -> Image.Image:
    """Draws a scene as an RGB image of `image_size` x `image_size` pixels."""
    canvas = _draw_background(scene.background, image_size * SUPERSAMPLING)
    draw = ImageDraw.Draw(canvas)
    if scene.second is not None:
        _draw_item(canvas, draw, scene.second)
    _draw_item(canvas, draw, scene.subject)
    return canvas.reduce(SUPERSAMPLING)
