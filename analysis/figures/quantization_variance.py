"""Variance of quantized dot products by inner dimension, measured and predicted.

Lines: `python -m experiments.quant_error`. After appendix C of arXiv:2304.13013, which derives that
the weight gradient, whose products sum over batch and tokens, is the noisiest.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from analysis import style
from analysis.bench import newest

LINES = "quantization_variance"
CASES = {  # case: name in print, color
    "int8": ("int8", style.PRECISIONS["switchback"][1]),
    "e4m3": ("fp8, both e4m3", style.PRECISIONS["fp8_switchback"][1]),
    "e5m2 e4m3": ("fp8, e5m2 and e4m3", style.PRECISIONS["fp8_tensorwise"][1]),
    **{name: style.PRECISIONS[name] for name in ("fp8_blockwise", "mxfp8")},
    **{name: style.PRECISIONS[name] for name in ("nvfp4_rht_sr", "nvfp4", "mxfp4")},
}
VIT_H = {  # terms that ViT-H/14's products sum: widths; 256 images, 128 patches and a token
    "output,\ngrad_input": (1280, 5120),
    "grad_weight": (33024, 33024),
}
COLUMNS = ("case", "inner_dim", "measured", "predicted", "ratio", "file")


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per case and inner dimension, from the newest file that has it: what is plotted."""
    frame = newest(lines[lines["case"].isin(CASES)], ["case", "inner_dim"])
    order = frame["case"].map(list(CASES).index)
    frame = frame.assign(order=order).sort_values(["order", "inner_dim"])
    return frame[list(COLUMNS)].reset_index(drop=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel, both axes logarithmic: points measured, lines predicted, ViT-H's sums marked.

    Dotted lines join the points of cases without a prediction.
    """
    above = blended_transform_factory(ax.transData, ax.transAxes)
    for name, (first, last) in VIT_H.items():
        ax.axvspan(first / 1.04, last * 1.04, color="#DDDDDD", lw=0, zorder=0.5)
        middle = (first * last) ** 0.5
        ax.text(middle, 1.02, name, transform=above, ha="center", va="bottom", fontsize=6.5)
    for case, part in frame.groupby("case", sort=False):
        label, color = CASES[case]
        if is_predicted := part["predicted"].notna().any():
            ax.plot(part["inner_dim"], part["predicted"], color=color, lw=1, label=label)
        points = {"marker": "o", "markersize": 3.2, "linestyle": "none" if is_predicted else ":"}
        points |= {} if is_predicted else {"lw": 0.7, "label": label}
        ax.plot(part["inner_dim"], part["measured"], color=color, **points)
    ax.set(xscale="log", yscale="log", xlabel="inner dimension", ylabel="variance of the error")
    key = "points measured, solid lines predicted"
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.24), borderaxespad=0, ncols=3, title=key,
              columnspacing=1, handlelength=1.4, fontsize=6.5, title_fontsize=6.5,
              alignment="left")  # fmt: skip
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """One panel."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.1)
    plot(frame, figure.subplots())


def caption(frame: pd.DataFrame) -> str:
    """Describes the plot and the largest difference between prediction and measurement."""
    worst = 100 * (frame["ratio"] - 1).abs().max()
    first, last = frame["inner_dim"].min(), frame["inner_dim"].max()
    (narrow, wide), (tokens, _) = VIT_H.values()
    return (
        "Variance of the error of dot products of quantized standard normal numbers, by inner "
        f"dimension ({first:,} to {last:,}). Int8 and fp8 have SwitchBack's granularities (one "
        "scale per row, one for the other operand), the others those of their recipes' weight "
        "gradients. Points: measured; solid lines: predicted, K (E[x^2] e_w + E[w^2] "
        "e_x + e_x e_w) with e = E[step^2] / 12, where step is the distance between neighboring "
        f"numbers. They differ by at most {worst:.1f}%. Gray: the sums of ViT-H/14's products: "
        f"{narrow:,} to {wide:,} features, and for the weight gradient {tokens:,} tokens (256 "
        "images per GPU, half of the patches dropped). After appendix C, arXiv:2304.13013."
    )
