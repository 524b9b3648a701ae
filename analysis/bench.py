"""Benchmark lines as tables, which figures and verdicts share.

A time is compared only with times of the same file: one machine, one run of a benchmark.
"""

from pathlib import Path

import pandas as pd

from analysis import paper
from analysis.load import NoRunsError, NotMadeError
from analysis.run_files import as_path
from lowprec.runs.read import read_rows

QUANTIZE = ("quantize_x", "quantize_g", "quantize_w")
PRODUCTS = ("output", "grad_input", "grad_weight")
END_TO_END = ("high", "switchback", "hw_fp8_switchback", "llm_int8")  # cases
BASELINES = {  # of a whole model: the cases of which the fastest counts
    "high": ("high",),
    "open_clip": ("open_clip", "open_clip eager"),
    "autograd_high": ("autograd_high",),
}
SETTINGS = {"image_size": "{:.0f} px", "patch_dropout": "patch dropout {:g}"}  # of a line, in words
SCALING = "scale"  # lines of several devices, as each is compared with its own
RUN = ["file", "device", "host", "commit", "shape"]  # what lines of it share that are compared
SCALED = (  # their shape
    r"^(?P<model>.+)-(?P<precision>[^-]+)-(?P<optimizer>[^-]+)-s\d+, "
    r"batch (?P<batch>\d+) a process(?P<settings>.*)$"
)
MAKERS = {"quantization_variance": "quant_error"}


def load_lines(root: Path | str, slug: str) -> pd.DataFrame:
    """A row per line of a benchmark in `root/<slug>/*.jsonl` and `root/bench/<slug>/*.jsonl`.

    `file` is the line's file; `ms` is NaN for a case that was skipped or wrong.
    Raises NoRunsError if there are no lines, if a file is damaged, and, except for SCALING, for
    several devices.
    """
    folders = as_path(root) / slug, as_path(root) / "bench" / slug
    files = sorted(path for folder in folders for path in folder.glob("*.jsonl"))
    try:
        rows = [{**row, "file": str(file)} for file in files for row in read_rows(file)]
    except ValueError as error:
        raise NoRunsError(str(error)) from error
    frame = pd.DataFrame(rows)
    if frame.empty:
        raise NotMadeError(
            f"{root}: no lines in {slug}/*.jsonl or bench/{slug}/*.jsonl; to make some: "
            f"python -m experiments.{MAKERS.get(slug, f'benchmarks {slug}')}"
        )
    devices = sorted(frame["device"].unique())
    if len(devices) > 1 and slug != SCALING:
        raise NoRunsError(
            f"{root}: {slug} was measured on {', '.join(devices)}; a figure shows one "
            "device: move the files of each into a folder of its own"
        )
    return frame.assign(ms=pd.to_numeric(frame["ms"]))


def newest(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Keeps the lines of the newest file for each value of `keys`; file names are times."""
    return frame[frame["file"] == frame.groupby(keys)["file"].transform("max")]


def saved_percent(ms: pd.Series, base_ms: pd.Series) -> pd.Series:
    """Returns the time saved in percent of the base, the paper's speedup: 50 is twice as fast."""
    return 100 * (1 - ms / base_ms)


def switchback_times(lines: pd.DataFrame) -> pd.DataFrame:
    """Returns SwitchBack's time as the sum of its operations: `ms`, which includes `quantize_ms`.

    Lines are those of `benchmarks.ops`; times are means over both directions of a layer. `base_ms`
    is the same in 16 bits. One row per device, tokens, dim and dtype (int8, fp8) for which a file
    has all operations; NoRunsError if there are none.
    """
    ours = lines[lines["case"].isin(QUANTIZE + PRODUCTS) & lines["ms"].notna()]
    size, operation, rows = ["tokens", "dim"], ["dtype", "case"], []
    by = newest(ours, [*size, *operation]).groupby(["file", "device", *size, *operation])["ms"]
    means = by.mean()[by.count() == 2]
    for at, group in means.groupby(["file", "device", *size]):
        times = group.droplevel(["file", "device", *size])
        for dtype in ("int8", "fp8"):
            quantize = [times.get((dtype, case)) for case in QUANTIZE]
            products = [times.get((dtype, case)) for case in PRODUCTS[:2]]
            base = [times.get(("bf16", case)) for case in PRODUCTS]
            if None not in (*quantize, *products, *base):
                total = sum(quantize) + sum(products) + base[2]  # grad_weight stays in 16 bits
                rows.append((*at, dtype, total, sum(quantize), sum(base)))
    if not rows:
        raise NoRunsError("no file has all operations of SwitchBack and of 16 bits for any dim")
    columns = ["file", "device", "tokens", "dim", "dtype", "ms", "quantize_ms", "base_ms"]
    return pd.DataFrame(rows, columns=columns)


def with_settings(lines: pd.DataFrame) -> pd.DataFrame:
    """Adds the settings of the model to `shape`, where a line holds them."""
    shape = lines["shape"]
    for name, words in SETTINGS.items():
        if name in lines:
            shape = shape + lines[name].map(f", {words}".format).where(lines[name].notna(), "")
    return lines.assign(shape=shape)


def end_to_end(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per shape, baseline and case of one file; `value` is the time saved in %.

    `quantized`: how many linear layers have 8 bits, such as `128 of 224`, or NaN.

    A shape is the model, whose name is its first word, the batch and the settings. If a file has a
    case twice, the last counts. Raises NoRunsError if no case has a baseline.
    """
    lines = with_settings(lines)
    timed = lines[lines["ms"].notna()]
    timed = timed.assign(model=timed["shape"].str.extract(r"^(\w+)", expand=False))
    at = ["file", "shape"]
    timed = timed.drop_duplicates([*at, "case"], keep="last")
    frames = []
    for baseline, cases in BASELINES.items():
        base = timed[timed["case"].isin(cases)].groupby(at)["ms"].min().rename("base_ms")
        others = [case for case in END_TO_END if case not in cases]
        part = timed[timed["case"].isin(others)].join(base, on=at, how="inner")
        frames.append(part.assign(baseline=baseline))
    table = pd.concat(frames, ignore_index=True)
    if table.empty:
        raise NoRunsError(
            f"no line of {', '.join(END_TO_END)} has {' or '.join(BASELINES)} next to it, "
            "of the same shape, in one file"
        )
    table = newest(table, ["shape", "baseline"])
    table["value"] = saved_percent(table["ms"], table["base_ms"])
    table = table.rename(columns={"device": "source", "case": "series"})
    columns = ["file", "source", "model", "shape", "baseline", "series", "quantized"]
    columns += ["ms", "base_ms", "value"]
    return table.reindex(columns=columns).reset_index(drop=True)


def quantize_shares(lines: pd.DataFrame) -> pd.DataFrame:
    """`value`: % of SwitchBack's time spent in quantize operations, by `series`, tokens and dim.

    Raises NoRunsError unless one file has all operations at some dim.
    """
    times = switchback_times(lines).rename(columns={"device": "source", "dtype": "series"})
    times["value"] = 100 * times["quantize_ms"] / times["ms"]
    return times[["file", "source", "series", "tokens", "dim", "value"]]


def weak_scaling(lines: pd.DataFrame) -> pd.DataFrame:
    """`ratio`: images/s per GPU relative to one GPU in the same run, on the same host.

    One row per run, `kind` (ddp, fsdp2) and number of processes, 1 among them. If a run has a case
    twice, the last counts. `attrs["left_out"]` names the lines whose run has none of one process
    and those whose shape is not of this form; NoRunsError if these are all.
    """
    timed = lines.reindex(columns=[*RUN, "case", "ms"]).dropna(subset="ms")
    timed = timed.drop_duplicates([*RUN, "case"], keep="last")
    timed = timed.join(timed["case"].str.extract(r"^(?P<kind>ddp|fsdp2) x (?P<processes>\d+)$"))
    one = timed.loc[timed["case"] == "one process", [*RUN, "ms"]].rename(columns={"ms": "base_ms"})
    table = timed.dropna(subset="kind").merge(one, how="left", on=RUN)
    names, is_step = table["case"] + " of " + table["shape"], table["shape"].str.match(SCALED)
    has_one = table["base_ms"].notna()
    left_out = dict.fromkeys(names[~has_one], "no line of one process of the same run and host")
    left_out |= dict.fromkeys(names[~is_step], "its shape is not that of a training step")
    table = table[has_one & is_step]
    if table.empty:
        raise NoRunsError("no line of ddp or fsdp2 has one of one process next to it, of its shape")
    first = table.drop_duplicates([*RUN, "kind"])
    table = pd.concat([first.assign(processes=1, ms=first["base_ms"]), table], ignore_index=True)
    table["processes"] = table["processes"].astype(int)
    table["ratio"] = table["base_ms"] / table["ms"]  # each process has the same number of images
    table = table.join(table["shape"].str.extract(SCALED)).rename(columns={"device": "source"})
    table = table.drop(columns=["case", "shape"])
    table.attrs["left_out"] = left_out
    return table


def devices(frame: pd.DataFrame) -> str:
    """Names the device of the measured rows for a caption."""
    return ", ".join(sorted(set(frame["source"]) - {paper.SOURCE}))
