"""Reads benchmark lines as one table, and draws the elements that several figures share.

A time is compared only with times of the same file: one machine, one run of a benchmark.
"""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import paper, style
from analysis.load import NoRunsError
from analysis.run_files import as_path
from lowprec.runs.read import read_rows

QUANTIZE = ("quantize_x", "quantize_g", "quantize_w")
PRODUCTS = ("output", "grad_input", "grad_weight")
MAKERS = {"quantization_variance": "quant_error", "layer_memory": "benchmarks layer"}


def load_lines(root: Path | str, slug: str) -> pd.DataFrame:
    """Returns the lines of a benchmark that a figure shows; see `read_lines`.

    `ms` is NaN for a case that was skipped or wrong.
    Raises NoRunsError if there are no lines, if a file is damaged, and for several devices.
    """
    frame = read_lines(root, slug)
    if frame.empty:
        raise NoRunsError(
            f"{root}: no lines in {slug}/*.jsonl or bench/{slug}/*.jsonl; to make some: "
            f"python -m experiments.{MAKERS.get(slug, f'benchmarks {slug}')}"
        )
    devices = sorted(frame["device"].unique())
    if len(devices) > 1:
        raise NoRunsError(
            f"{root}: {slug} was measured on {', '.join(devices)}; a figure shows one "
            "device: move the files of each into a folder of its own"
        )
    return frame.assign(ms=pd.to_numeric(frame["ms"]))


def read_lines(root: Path | str, slug: str) -> pd.DataFrame:
    """Returns a row per line of `root/<slug>/*.jsonl` and `root/bench/<slug>/*.jsonl`, or none.

    `file` is the line's file. Raises NoRunsError if a file is damaged.
    """
    folders = as_path(root) / slug, as_path(root) / "bench" / slug
    files = sorted(path for folder in folders for path in folder.glob("*.jsonl"))
    try:
        rows = [{**row, "file": str(file)} for file in files for row in read_rows(file)]
    except ValueError as error:
        raise NoRunsError(str(error)) from error
    return pd.DataFrame(rows)


def newest(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Keeps the lines of the newest file for each value of `keys`; file names are times."""
    return frame[frame["file"] == frame.groupby(keys)["file"].transform("max")]


def saved_percent(ms: pd.Series, base_ms: pd.Series) -> pd.Series:
    """Returns the time saved in percent of the base, the paper's speedup: 50 is twice as fast."""
    return 100 * (1 - ms / base_ms)


def operations(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns the mean milliseconds of our operations over both directions of a layer.

    Lines are those of `benchmarks.ops`; one row per file, tokens, dim, case and dtype.
    """
    ours = lines[lines["case"].isin(QUANTIZE + PRODUCTS) & lines["ms"].notna()]
    keys = ["tokens", "dim", "case", "dtype"]
    mean = newest(ours, keys).groupby(["file", "device", *keys])["ms"].agg(["mean", "count"])
    mean = mean[mean["count"] == 2].rename(columns={"mean": "ms"})
    return mean["ms"].reset_index()


def switchback_times(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns SwitchBack's time as the sum of its operations: `ms`, which includes `quantize_ms`.

    `base_ms` is the same in 16 bits. One row per tokens, dim and dtype (int8, fp8) for which a file
    has all operations.
    """
    rows = []
    for at, group in operations(lines).groupby(["file", "device", "tokens", "dim"]):
        times = group.set_index(["dtype", "case"])["ms"]
        for dtype in ("int8", "fp8"):
            quantize = [times.get((dtype, case)) for case in QUANTIZE]
            products = [times.get((dtype, case)) for case in PRODUCTS[:2]]
            base = [times.get(("bf16", case)) for case in PRODUCTS]
            if None not in (*quantize, *products, *base):
                total = sum(quantize) + sum(products) + base[2]  # grad_weight stays in 16 bits
                rows.append((*at, dtype, total, sum(quantize), sum(base)))
    columns = ["file", "device", "tokens", "dim", "dtype", "ms", "quantize_ms", "base_ms"]
    return pd.DataFrame(rows, columns=columns)


def layer_times(lines: pd.DataFrame, cases: tuple[str, ...]) -> pd.DataFrame:
    """Returns times of some cases of `benchmarks.layer`, summed over both directions of a layer.

    One row per case, dim and mode (eager, or as a CUDA graph); `saved` is the time saved in percent
    of nn.Linear's in the same mode and file. A row comes from the newest file that has its case.
    """
    both = lines[(lines["direction"] == "both") & lines["ms"].notna()]
    both = both[both["mode"].isin(("eager", "graph"))]
    at = ["file", "tokens", "dim", "mode"]
    base = both[both["case"] == "linear"].set_index(at)["ms"].rename("base_ms")
    times = both[both["case"].isin(cases)].join(base, on=at, how="inner")
    times = newest(times, ["case", *at[1:]])
    if times.empty:
        raise NoRunsError(f"no file has lines of {' or '.join(cases)} and of linear")
    times = times.assign(saved=saved_percent(times["ms"], times["base_ms"]))
    times = times.rename(columns={"device": "source", "case": "series"})
    return times[["file", "source", "series", "mode", "tokens", "dim", "ms", "base_ms", "saved"]]


def plot_layer(frame: pd.DataFrame, ax: Axes, column: str) -> None:
    """Draws a line per case over dim, in the color of its precision; CUDA graphs are dashed."""
    ours = frame[frame["source"] != paper.SOURCE]
    order = [name for name in style.PRECISIONS if name in set(ours["series"])]
    for series in order:
        for mode, part in ours[ours["series"] == series].groupby("mode"):
            for tokens, line in part.groupby("tokens"):
                many = ours["tokens"].nunique() > 1
                name = style.PRECISIONS[series][0] + (f", {tokens:,} tokens" if many else "")
                line = line.sort_values("dim")
                ax.plot(line["dim"], line[column], color=style.color(series, ""), marker="o", ms=3,
                        ls="-" if mode == "eager" else (0, (3, 1.2)),
                        label=name + ("" if mode == "eager" else ", CUDA graph"))  # fmt: skip
    dim_axis(ax, frame["dim"])


def plot_paper(frame: pd.DataFrame, ax: Axes) -> None:
    """Draws the paper's percentages as gray lines, darker for more tokens, under one label."""
    theirs = frame[frame["source"] == paper.SOURCE]
    counts = sorted(theirs["tokens"].unique())
    for rank, tokens in enumerate(counts):
        part = theirs[theirs["tokens"] == tokens].sort_values("dim")
        gray = str(0.8 - 0.5 * rank / max(1, len(counts) - 1))
        first = f"{counts[0]:,} to " if len(counts) > 1 else ""
        label = f"{paper.SOURCE}, {first}{tokens:,} tokens" if rank == len(counts) - 1 else None
        ax.plot(part["dim"], part["value"], color=gray, lw=0.9, ls=(0, (2, 1.2)), label=label)


def dim_axis(ax: Axes, dims: pd.Series) -> None:
    """Makes the x axis logarithmic, with a tick for each dim."""
    ax.set_xscale("log")
    ticks = sorted(set(dims))
    ax.set_xticks(ticks, [str(dim) for dim in ticks], rotation=45, ha="right")
    ax.minorticks_off()
    ax.set_xlabel("dim")


def legend_below(figure: Figure, axes: list[Axes], ncols: int) -> None:
    """Draws one legend under the panels; labels that they share appear once."""
    named = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=ncols)


def devices(frame: pd.DataFrame) -> str:
    """Names the device of the measured rows for a caption."""
    return ", ".join(sorted(set(frame["source"]) - {paper.SOURCE}))
