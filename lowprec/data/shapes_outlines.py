"""Outlines of the shapes: polygons around the origin, of extent 1."""

import numpy as np


def _arc(x: float, y: float, rx: float, ry: float, start: float, stop: float) -> np.ndarray:
    """Points of an elliptic arc, float64 (n, 2); degrees, clockwise from the right."""
    angles = np.radians(np.linspace(start, stop, 2 + int(abs(stop - start) / 10)))
    return np.stack([x + rx * np.cos(angles), y + ry * np.sin(angles)], axis=1)


def _polar(radii: np.ndarray) -> np.ndarray:
    """A closed outline from its radii at evenly spaced angles, the first one pointing up."""
    angles = np.linspace(0, 2 * np.pi, len(radii), endpoint=False)
    return radii[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
    return np.stack([16 * np.sin(t) ** 3, -y], axis=1)


def _outlines() -> dict[str, np.ndarray]:
    """Every shape as one closed polygon, float64 (n, 2), its box centered, longer half side 1."""
    petals = 0.68 + 0.32 * np.cos(np.linspace(0, 10 * np.pi, 80, endpoint=False))
    tear = _arc(0, 0.35, 0.65, 0.65, -35, 215)
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
        "heart": _heart(),
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


OUTLINES = _outlines()
