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

from lowprec.runs import durable

COLUMN_WIDTH = 3.4  # inches
SMOOTHING = 40  # steps, arXiv:2304.13013
OTHER = "#666666"
RMS = "#0072B2"  # RMS_t and its spikes

PRECISIONS = {  # label in a run's name: (in print, color); bf16's color is its optimizer's
    "fp32": ("fp32", "#7A82B8"),
    "bf16": ("bf16", None),
    "fp16": ("fp16", "#327934"),
    "pure_bf16": ("pure bf16", "#D7CD4C"),
    "pure_fp16": ("pure fp16", "#DCBD64"),
    "switchback": ("SwitchBack int8", "#D55E00"),
    "switchback_m": ("SwitchBackM int8", "#873800"),
    "switchback_q": ("SwitchBackQ int8", "#AE69DA"),
    "llm_int8": ("LLM.int8()", "#009E73"),
    "fp8_tensorwise": ("fp8 tensor-wise", "#E69F00"),
    "fp8_rowwise": ("fp8 row-wise", "#0C8D7C"),
    "fp8_switchback": ("SwitchBack fp8", "#CC79A7"),
    "fp8_switchback_blocks": ("SwitchBack fp8, blocks", "#F6BCCD"),
    "fp8_blockwise": ("fp8 in blocks", "#6D8C2B"),
    "mxfp8": ("MXFP8", "#4A6FD0"),
    "mxfp4": ("MXFP4", "#9DB4F0"),
    "nvfp4": ("NVFP4", "#B07CC6"),
    "nvfp4_rht_sr": ("NVFP4, RHT, SR", "#7A3E96"),
    "nvfp4_then_bf16": ("NVFP4, then bf16", "#2A1AE6"),
    "hw_fp8_tensorwise": ("hardware fp8 tensor-wise", "#C3903A"),
    "hw_fp8_switchback": ("SwitchBack hardware fp8", "#8C3959"),
    "hw_fp8_blockwise": ("hardware fp8 in blocks", "#45591B"),
    "autograd_high": ("autograd function", "#392994"),
}
OPTIMIZERS = {  # optimizer.name, with its rule: (in print, line style, color under bf16)
    "stable_adamw": ("StableAdamW", "-", "#0072B2"),
    "stable_adamw_8bit": ("8-bit StableAdamW", (0, (8, 1.2)), "#2A1AE6"),
    "adamw": ("AdamW", (0, (3.2, 1.2)), "#000000"),
    "adamw_clip": ("AdamW + gradient clipping", (0, (1.2, 1.0)), "#56B4E9"),
    "adamw_zclip": ("AdamW + ZClip", (0, (2, 1, 1, 1)), "#D55E00"),
    "adamw_skip_step": ("AdamW + SkipStep", (0, (4, 1, 2, 1)), "#E69F00"),
    "adamw_on_warning_clip": ("AdamW + clip on warning", (0, (6, 2)), "#CCBF6A"),
    "adamw_on_warning_skip": ("AdamW + skip on warning", (0, (3, 1, 1, 1)), "#5C4A12"),
    "adamw_on_warning_beta2": ("AdamW + beta2 on warning", (0, (2, 2)), "#7F6BFF"),
    "muon": ("Muon", (0, (6, 1, 1, 1)), "#009E73"),
    "adagc": ("AdaGC", (0, (1, 2.5)), "#CC79A7"),
    "stable_spam": ("StableSPAM", (0, (3, 1, 1, 1, 1, 1)), "#6D8C2B"),
    "adamw8bit_bnb": ("8-bit AdamW (bitsandbytes)", (0, (5, 1, 1, 1)), "#751952"),
    "adamw8bit_torchao": ("8-bit AdamW (torchao)", (0, (5, 1, 1, 1, 1, 1)), "#9D2F8E"),
}
INTERVENTIONS = {  # intervention.name: (in print, color where the figure is about it)
    "none": ("no change", "#4D4D4D"),
    "zero_init": ("zero-init layer-scale", "#DC267F"),
    "kq_norm": ("KQ layer norm", "#873800"),
}
MODELS = {  # model.name: in print, small to large
    "nano": "nano",
    "mini_b": "mini B",
    "mini_l": "mini L",
    "mini_h": "mini H",
    "vit_b14": "ViT-B/14",
    "vit_b32": "ViT-B/32",
    "vit_l14": "ViT-L/14",
    "vit_h14": "ViT-H/14",
}


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
    shade = PRECISIONS.get(precision.partition("@")[0], (precision, OTHER))[1]
    shade = shade or OPTIMIZERS.get(optimizer, (optimizer, "-", OTHER))[2]
    return paler(shade, variant)


def beta2_color(beta2: float, variant: int = 0) -> tuple[float, float, float]:
    """The color of a constant beta2 where lines differ by it: dark 0.5 to bright 0.999."""
    averaged = math.log10(1 / (1 - beta2))  # of steps: 0.3 of 0.5, 3 of 0.999
    return _of_map("plasma", 0.85 * (averaged - 0.3) / 2.7, variant)


def setting_color(variant: int, last: int) -> tuple[float, float, float]:
    """The color of a setting, numbered from 0 to `last`, where all lines share a method."""
    return _of_map("plasma", 0.85 * variant / last)


def decay_color(beta2_decay: float, variant: int = 0) -> tuple[float, float, float]:
    """The color of the schedule beta2 = 1 - t^-beta2_decay."""
    return _of_map("viridis", 2.4 * beta2_decay - 0.78, variant)


def depth_color(share: float) -> tuple[float, float, float]:
    """The color of a block by depth, 0 the first and 1 the last."""
    return _of_map("viridis", 0.9 * share)


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


def model(name: str) -> str:
    """A model in print."""
    return MODELS.get(name, name)


def short_tensor(name: str) -> str:
    """A tensor in print: `visual.6.ln_1.bias` for `visual.transformer.resblocks.6.ln_1.bias`."""
    return name.replace("transformer.resblocks.", "" if name.startswith("visual") else "text.")


def precision(label: str) -> str:
    """A precision in print: `NVFP4, then bf16 from step 1,001` for `nvfp4_then_bf16@1001`."""
    name, _, step = label.partition("@")
    return PRECISIONS.get(name, (name,))[0] + (f" from step {int(step):,}" if step else "")


def method(label: str, optimizer: str) -> str:
    """`SwitchBack int8, StableAdamW`: a method in print."""
    return f"{precision(label)}, {optimizer_name(optimizer)}"


def optimizer_name(name: str) -> str:
    """An optimizer in print, with its rule: `8-bit StableAdamW` for `stable_adamw_8bit`."""
    return OPTIMIZERS.get(name, (name,))[0]


def family(precision: str) -> str:
    """`int8` or `fp8` for a method in 8 bits, else ""."""
    if "fp8" in precision:
        return "fp8"
    return "int8" if precision.startswith(("switchback", "llm_int8")) else ""


def families(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Panels as (family, rows): int8 and fp8 methods, with the 16-bit ones in both.

    There is one panel with all rows unless both families occur.
    """
    of_row = frame["precision"].map(family)
    names = [name for name in ("int8", "fp8") if (of_row == name).any()]
    if len(names) < 2:
        return [("".join(names), frame)]
    return [(name, frame[of_row.isin(["", name])]) for name in names]


def log_axis(ax: Axes) -> None:
    """A logarithmic axis: 0.2, 0.5, 1, 2, 5, or only powers of ten over many decades."""
    ax.set_yscale("log")
    bottom, top = ax.get_ylim()
    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5) if top < 300 * bottom else ()))
    for which in ("major", "minor"):
        getattr(ax.yaxis, f"set_{which}_formatter")("{x:g}")


def rank(name: str, table: dict | tuple) -> tuple[int, str]:
    """Sort key: the order of a table above, then other names."""
    return (list(table).index(name) if name in table else len(table), name)


def smoothing_width(num_steps: int) -> int:
    """Width of the smoothing box in steps: the paper's 40, at most a tenth of the run."""
    return max(1, min(SMOOTHING, num_steps // 10))


def smooth(series: pd.Series, width: int = SMOOTHING) -> pd.Series:
    """Centered box average; NaN within half a box of the edges and of non-finite values."""
    return series.astype(float).rolling(width, center=True).mean()
