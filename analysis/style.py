"""The style of every figure: one color per method, one line style per optimizer, type for print.

A method is a precision and an optimizer. Under bf16, the baseline of optimizer studies, the
optimizer gives the color; elsewhere the precision does. The base palette is Okabe and Ito's, and
recipes that share a figure also differ for readers with red or green color blindness. Lines of one
method that differ by a number (beta2, depth) get their colors from a color map, and the seeds of
one setting tones.
"""

import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from analysis.naming import NARROW, OPTIMIZERS, PRECISIONS
from lowprec.runs import durable

COLUMN_WIDTH = 3.4  # inches
SMOOTHING = 40  # steps, arXiv:2304.13013
OTHER = "#666666"
RMS = "#0072B2"  # RMS_t and its spikes


def style() -> AbstractContextManager:
    """A context for drawing figures that are readable in print at COLUMN_WIDTH."""
    sheet = Path(__file__).with_name("figures.mplstyle")
    return matplotlib.rc_context(matplotlib.rc_params_from_file(sheet, use_default_template=False))


def save(figure: Figure, stem: Path, frame: pd.DataFrame) -> None:
    """Writes `stem`.png, .pdf and .csv, each whole or not at all; DiskError names the file."""
    for kind, metadata in (("png", None), ("pdf", {"CreationDate": None})):
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, metadata=metadata)
        durable.replace(Path(f"{stem}.{kind}"), picture.getvalue())
    durable.replace(Path(f"{stem}.csv"), frame.to_csv(index=False, lineterminator="\n").encode())


def color(precision: str, optimizer: str = "", variant: int = 0) -> tuple[float, float, float]:
    """The color of a method, or of a precision: gray for bf16; each further `variant` is paler."""
    name = re.split("[@ ]", precision)[0]
    shade = NARROW.get(name) or PRECISIONS.get(name, (name, OTHER))[1]
    shade = shade or OPTIMIZERS.get(optimizer, (optimizer, "-", OTHER))[2]
    return paler(shade, variant)


def setting_color(number: float, last: float, variant: int = 0) -> tuple[float, float, float]:
    """The color of a setting, numbered from 0 to `last`, where all lines share a method."""
    return paler(matplotlib.colormaps["plasma"](0.85 * number / last)[:3], variant)


def paler(shade: str | tuple, variant: int) -> tuple[float, float, float]:
    """A color, paler with each variant."""
    share = 0.75 * (1 - 0.6**variant)
    return tuple(part + (1 - part) * share for part in to_rgb(shade))


def tones(shade: str | tuple, num: int) -> list[tuple[float, float, float]]:
    """`num` tones of a color, from dark to pale, for the seeds of one setting."""
    shares = np.linspace(-0.45, 0.55, num) if num > 1 else [0.0]  # of black or white
    return [
        tuple(part + ((share > 0) - part) * abs(share) for part in to_rgb(shade))
        for share in shares
    ]


def line_style(optimizer: str) -> str | tuple:
    """The line style of an optimizer."""
    return OPTIMIZERS.get(optimizer, (optimizer, "-", OTHER))[1]


def look(head: pd.Series) -> tuple[tuple[float, float, float], str | tuple]:
    """The color and line style of a run's method."""
    color_of_method = color(head["precision"], head["optimizer"], head["variant"])
    return color_of_method, line_style(head["optimizer"])


def look_of_recipe(head: pd.Series) -> tuple[tuple[float, float, float], str]:
    """The color of a run's recipe, or else of its precision, gray for bf16, and a solid line."""
    if "recipe" in head:
        return color(head["recipe"]), "-"
    return color(head["precision"], variant=head["variant"]), "-"


def log_axis(ax: Axes, name: str = "y") -> None:
    """A logarithmic axis: 0.2, 0.5, 1, 2, 5, or more of them, or only powers of ten."""
    getattr(ax, f"set_{name}scale")("log")
    axis, (low, high) = getattr(ax, f"{name}axis"), getattr(ax, f"get_{name}lim")()
    subs = (2, 5) if high < 300 * low else ()
    if high < 6 * low:
        subs = (1.2, 1.5, 2, 3, 4, 5, 7) if high > 2.5 * low else (1.2, 1.4, 1.6, 1.8, 2, 4, 6, 8)
    axis.set_minor_locator(LogLocator(subs=subs))
    ax.tick_params(axis=name, which="both", length=3)  # else labels stand at two heights
    for which in ("major", "minor"):
        getattr(axis, f"set_{which}_formatter")("{x:,g}")


def smooth(series: pd.Series) -> pd.Series:
    """Centered average over the paper's 40 steps, at most a tenth of the series.

    NaN within half that width of the edges and of non-finite values.
    """
    width = max(1, min(SMOOTHING, len(series) // 10))
    return series.astype(float).rolling(width, center=True).mean()
