"""Colors of methods are told apart by readers who see no red (protan) or no green (deutan)."""

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import memory_by_recipe, op_profile, quantize_share

LEAST = 10  # CIE76; neighbors in a legend differ visibly from about 5 on
SEEN = {  # Machado, Oliveira and Fernandes 2009, severity 1, of linear RGB
    "all": np.eye(3),
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
TO_XYZ = [
    [0.4124564, 0.3575761, 0.1804375],
    [0.2126729, 0.7151522, 0.0721750],
    [0.0193339, 0.1191920, 0.9503041],
]
WHITE = (0.95047, 1.0, 1.08883)


def lab(color, seen):
    """CIELAB of an sRGB color as it is seen."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(TO_XYZ) @ np.clip(np.array(SEEN[seen]) @ linear, 0, 1) / WHITE
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def too_near(colors, seen):
    """Pairs of names whose colors are nearer than LEAST."""
    return [
        (one, other)
        for one, other in itertools.combinations(colors, 2)
        if np.linalg.norm(lab(colors[one], seen) - lab(colors[other], seen)) < LEAST
    ]


METHODS = {name: color for name, (_, color) in style.PRECISIONS.items() if color}
METHODS |= {name: color for name, (*_, color) in style.OPTIMIZERS.items()}  # of bf16
FIXES = {name: color for name, (_, color) in style.INTERVENTIONS.items()}
FIXES |= {name: METHODS[name] for name in ("fp8_tensorwise", "adamw", "stable_adamw")}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize(
    "colors",
    [METHODS, FIXES, {name: color for name, color in memory_by_recipe.CASES.values()}],
    ids=["methods", "fixes", "memory"],
)
def test_any_two_methods_differ_in_color(colors, seen):
    assert too_near(colors, seen) == []


def test_colors_that_only_a_full_eye_tells_apart_are_found():
    colors = {"a": "#D55E00", "b": "#A87400"}
    assert too_near(colors, "all") == [] and too_near(colors, "protan") == [("a", "b")]


@pytest.mark.parametrize("figure", [op_profile, quantize_share], ids=["profile", "share"])
def test_a_method_has_one_name_and_one_color_in_figures_of_operations_too(figure):
    sources = pd.DataFrame({"source": ["GPU"] * 4, "tokens": 32768, "dim": [1024, 4096] * 2})
    frame = sources.assign(value=1.0, panel="saved", dtype=["int8"] * 2 + ["fp8"] * 2)
    frame["series"] = frame["dtype"] if figure is quantize_share else "switchback"
    ax = Figure().subplots()
    (figure.plot if figure is quantize_share else figure.plot_saved)(frame, ax)
    found = {line.get_label(): to_rgb(line.get_color()) for line in ax.lines}
    for name in ("switchback", "hw_fp8_switchback"):
        in_print, color = style.PRECISIONS[name]
        assert found[f"{in_print}, 32,768 tokens"] == to_rgb(color)
