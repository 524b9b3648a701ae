"""The style of every figure: one color per method, one line style per optimizer, type for print.

A method is a precision and an optimizer. Under bf16, the baseline of optimizer studies, the
optimizer gives the color; elsewhere the precision does. The base palette is Okabe and Ito's, and
any two methods also differ for readers with red or green color blindness. Lines of one method
that differ by a number (beta2, depth) get their colors from a color map.
"""

import io
import math
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib
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
INT8_GRADIENT = PRECISIONS["llm_int8"][1]


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


def color(precision: str, optimizer: str, variant: int = 0) -> tuple[float, float, float]:
    """The color of a method; each further setting of it in one panel (`variant`) is paler."""
    name = precision.partition("@")[0]
    shade = {**PRECISIONS, **NARROW}.get(name, (name, OTHER))[1]
    shade = shade or OPTIMIZERS.get(optimizer, (optimizer, "-", OTHER))[2]
    return paler(shade, variant)


def beta2_color(beta2: float, variant: int = 0) -> tuple[float, float, float]:
    """The color of a constant beta2 where lines differ by it: dark 0.5 to bright 0.999."""
    averaged = math.log10(1 / (1 - beta2))  # of steps: 0.3 of 0.5, 3 of 0.999
    return _of_map("plasma", 0.85 * (averaged - 0.3) / 2.7, variant)


def setting_color(variant: int, last: int) -> tuple[float, float, float]:
    """The color of a setting, numbered from 0 to `last`, where all lines share a method."""
    return _of_map("plasma", 0.85 * variant / last)


def paler(shade: str | tuple, variant: int) -> tuple[float, float, float]:
    """A color, paler with each variant."""
    share = 0.75 * (1 - 0.6**variant)
    return tuple(part + (1 - part) * share for part in to_rgb(shade))


def _of_map(name: str, at: float, variant: int = 0) -> tuple[float, float, float]:
    return paler(matplotlib.colormaps[name](at)[:3], variant)


def line_style(optimizer: str) -> str | tuple:
    """The line style of an optimizer."""
    return OPTIMIZERS.get(optimizer, (optimizer, "-", OTHER))[1]


def look(head: pd.Series) -> tuple[tuple[float, float, float], str | tuple]:
    """The color and line style of a run's method."""
    color_of_method = color(head["precision"], head["optimizer"], head["variant"])
    return color_of_method, line_style(head["optimizer"])


def look_of_precision(head: pd.Series) -> tuple[tuple[float, float, float], str]:
    """The color of a run's precision, gray for bf16, and a solid line."""
    return color(head["precision"], "", head["variant"]), "-"


def log_axis(ax: Axes, name: str = "y") -> None:
    """A logarithmic axis: 0.2, 0.5, 1, 2, 5, or more of them, or only powers of ten."""
    getattr(ax, f"set_{name}scale")("log")
    axis, (low, high) = getattr(ax, f"{name}axis"), getattr(ax, f"get_{name}lim")()
    subs = (1.2, 1.5, 2, 3, 4, 5, 7) if high < 6 * low else (2, 5) if high < 300 * low else ()
    axis.set_minor_locator(LogLocator(subs=subs))
    for which in ("major", "minor"):
        getattr(axis, f"set_{which}_formatter")("{x:,g}")


def smooth(series: pd.Series) -> pd.Series:
    """Centered average over the paper's 40 steps, at most a tenth of the series.

    NaN within half that width of the edges and of non-finite values.
    """
    width = max(1, min(SMOOTHING, len(series) // 10))
    return series.astype(float).rolling(width, center=True).mean()
