"""The spikes of runs: `python -m analysis.spikes --run DIR [--tensor PATTERN] [--out DIR]`.

Prints each loss spike with the RMS spikes before it, how often loss spikes follow RMS spikes and
how often they would by chance, in which tensors, and how all that depends on the thresholds. With
--out the tables are written as CSV, and a picture of each loss spike. What a spike is:
`lowprec/diagnostics/README.md`.
"""

import argparse
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import cli, paper, recorded
from analysis.cli import ChoiceError
from analysis.load import Runs, load_runs
from analysis.spike_marks import FRACTIONS, TENSOR, THRESHOLDS, Series, protocol_of, read_series
from lowprec.diagnostics.spikes import (
    PROTOCOLS,
    Protocol,
    following,
    leads,
    loss_spikes,
    rms_spikes,
)

LOCAL_SHIFT = 1000  # steps; the phase of training stays about the same
AROUND = 60  # steps drawn on either side of a spike
NUM_CONTROLS = 10  # other tensors printed
SENSITIVITY = {
    "rms_threshold": (1.5, 2.0, 2.3, 3.0, 4.0),
    "loss_sigmas": (2.5, 3.2, 4.0, 6.0),
    "num_deviations": (1, 2, 3),
    "within": (5, 10, 20),
    "ignore_steps": (0, 200, 500, 1000, 2000),
    "window": (50, 100, 200, 400, 800),
    "max_lead": (4, 8, 16),
}


def spike_table(series: Series, protocol: Protocol, tensor: str = TENSOR) -> pd.DataFrame:
    """A row a loss spike: step, loss, before, peak, height, lead, num_tensors, tensors.

    `before`: median loss of the window before; `peak`: the largest loss up to `within` steps later;
    `height` = peak - before; `lead`: steps since the latest RMS spike of `tensor`, <NA> if none;
    `tensors`: those of the run with an RMS spike 1 to `max_lead` steps before, the earliest first,
    of one step the highest.
    """
    at = np.flatnonzero(loss_spikes(series.loss, protocol)) + 1
    rms_at = np.flatnonzero(rms_spikes(series.rms_of(tensor), protocol)) + 1
    marks = rms_spikes(series.rms, protocol)
    loss = np.where(np.isfinite(series.loss), series.loss, np.nan)
    rows = []
    for step, lead in zip(at.tolist(), leads(at, rms_at), strict=True):
        before = np.nanmedian(loss[max(0, step - 1 - protocol.window) : step - 1])
        peak = np.nanmax(loss[step - 1 : step + protocol.within])
        before_it = slice(max(0, step - 1 - protocol.max_lead), step - 1)
        late, high = marks[before_it], series.rms.to_numpy(float)[before_it]
        first = {i: late[:, i].argmax() for i in np.flatnonzero(late.any(axis=0))}
        order = sorted(first, key=lambda i: (first[i], -high[first[i], i]))
        names = [series.rms.columns[i] for i in order]
        values = (step, loss[step - 1], before, peak, peak - before, lead, len(names))
        rows.append((*values, " ".join(names)))
    columns = ["step", "loss", "before", "peak", "height", "lead", "num_tensors", "tensors"]
    return pd.DataFrame(rows, columns=columns).astype({"step": int, "lead": "Int64"})


def lead_table(series: Series, protocol: Protocol) -> pd.DataFrame:
    """A row a tensor, the most followed first: its name and the fields of `Following`."""
    loss_at, rms_at = loss_spikes(series.loss, protocol), rms_spikes(series.rms, protocol)
    rows = [
        {"tensor": name, **following(loss_at, rms_at[:, i], protocol)._asdict()}
        for i, name in enumerate(series.rms)
    ]
    rows.sort(key=lambda row: (-row["num_following"], row["p_value"]))
    return pd.DataFrame(rows)


def sensitivity_table(series: Series, protocol: Protocol, tensor: str = TENSOR) -> pd.DataFrame:
    """A row a threshold and value, all others as in `protocol`: the fields of `Following`."""
    rms, rows = series.rms_of(tensor), []
    for name, values in SENSITIVITY.items():
        for value in sorted({*values, getattr(protocol, name)}):
            changed = replace(protocol, **{name: value})
            found = following(loss_spikes(series.loss, changed), rms_spikes(rms, changed), changed)
            mark = "*" if value == getattr(protocol, name) else ""
            rows.append({"threshold": name, "value": f"{value:g}{mark}", **found._asdict()})
    return pd.DataFrame(rows)


def report(series: Series, protocol: Protocol, tensor: str) -> tuple[str, dict[str, pd.DataFrame]]:
    """What is to be said of one run, and the tables behind it by name."""
    num_steps, ignored = len(series.loss), protocol.ignore_steps
    if num_steps <= ignored:
        text = f"{num_steps:,} steps are recorded, and the first {ignored:,} are ignored: nothing "
        return text + "to look at yet. --ignore-steps N ignores fewer.", {}
    spikes = spike_table(series, protocol, tensor)
    rms = series.rms_of(tensor)
    num_rms = int(rms_spikes(rms, protocol).sum())
    matching = sum(fnmatchcase(name, tensor) for name in series.rms)
    where = tensor if matching < 2 else f"the largest of {matching} tensors {tensor}"
    lines = [
        f"{len(spikes)} loss spikes and {num_rms} RMS spikes ({where}) in {num_steps:,} steps."
    ]
    if np.isnan(rms).all():
        lines.append("RMS_t is not recorded there.")
    tables = {"spikes": spikes, "sensitivity": sensitivity_table(series, protocol, tensor)}
    if len(spikes):
        shown = spikes.assign(tensors=spikes["tensors"].map(_first_names))
        lines += ["", _text(shown), "", *_lead_lines(series, protocol, tensor, spikes["lead"])]
        tables["tensors"] = lead_table(series, protocol)
        shown, others = tables["tensors"].iloc[:NUM_CONTROLS], tables["tensors"][NUM_CONTROLS:]
        lines += ["", "By tensor, the most followed first (p is of one tensor alone):"]
        lines.append(_text(shown) if len(shown) else "RMS_t is recorded of none.")
        if len(others):
            lines.append(f"and {len(others)} more, median share {others['share'].median():.1%}")
    if tables["sensitivity"]["num_loss_spikes"].any():
        by_threshold = _text(tables["sensitivity"])
        lines += ["", "By threshold, one changed at a time (* as above):", by_threshold]
    else:
        lines.append("There is none with other thresholds either.")
    return "\n".join(lines), tables


def _lead_lines(series: Series, protocol: Protocol, tensor: str, lead: pd.Series) -> list[str]:
    loss_at = loss_spikes(series.loss, protocol)
    rms_at = rms_spikes(series.rms_of(tensor), protocol)
    found = following(loss_at, rms_at, protocol)
    near = following(loss_at, rms_at, protocol, LOCAL_SHIFT)
    histogram = {steps: int((lead == steps).sum()) for steps in range(1, protocol.max_lead + 1)}
    late = int((lead > protocol.max_lead).sum())
    counts = ", ".join(f"{steps}: {count}" for steps, count in histogram.items())
    return [
        f"{found.num_following} of {found.num_loss_spikes} loss spikes ({found.share:.0%}) come 1 "
        f"to {protocol.max_lead} steps after an RMS spike.",
        f"By chance {found.chance:.1%} (95%: {found.low:.0%} to {found.high:.0%}), "
        f"p = {found.p_value:.2g}, shifting the RMS spikes over the run; {near.chance:.1%} "
        f"(95%: {near.low:.0%} to {near.high:.0%}), p = {near.p_value:.2g}, by at most "
        f"{LOCAL_SHIFT:,} steps.",
        f"Lead in steps, of how many: {counts}; more: {late}; none before: {lead.isna().sum()}.",
        f"The paper: {paper.FOLLOWING_SAID}.",
    ]


def _first_names(names: str) -> str:
    first, *rest = names.split() or ["-"]
    return f"{first} +{len(rest)}" if rest else first


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")


def _write(out: Path, tables: dict, runs: Runs, protocol: Protocol, tensor: str) -> None:
    """Writes the tables of one run, and a picture of each loss spike: loss and RMS_t around it."""
    from matplotlib.figure import Figure

    from analysis.figures import rms_and_loss  # late, as it imports this module
    from analysis.style import COLUMN_WIDTH, style

    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    frame = rms_and_loss.query(runs, protocol, tensor)
    for step in tables["spikes"]["step"] if len(frame) else ():
        with style():
            figure = Figure(layout="constrained", figsize=(COLUMN_WIDTH, 3.4))
            part = frame[(frame["step"] - step).abs() <= AROUND]
            rms_and_loss.plot(part, figure.subplots())
            figure.savefig(out / f"spike_{step}.png")
    print(f"Wrote {out}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.spikes", description="The spikes of runs."
    )
    parser.add_argument("--run", required=True, help="a run directory, or many below it; or a URL")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of tensors [{TENSOR}]")
    parser.add_argument("--out", type=Path, help="folder for tables and pictures")
    parser.add_argument(
        "--protocol", choices=("run", *PROTOCOLS), default="run", help="thresholds [the run's own]"
    )
    for name, what in THRESHOLDS.items():
        kind = float if name in FRACTIONS else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=what)
    options = parser.parse_args(arguments)
    low = {"window": 2, "num_deviations": 1, "within": 1, "max_lead": 1}
    for name in THRESHOLDS:
        value, least = getattr(options, name), low.get(name, 0)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} takes {least} or more, not {value}")
    return options


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parse(arguments)
    given = {k: v for k, v in vars(options).items() if k in THRESHOLDS and v is not None}
    tensor = options.tensor
    runs = load_runs(options.run)
    for head in runs.runs.to_dict("records"):
        alone = recorded.of_run(runs, head["run"])
        series = read_series(alone, head["run"])
        names = list(series.rms)
        if names and not any(fnmatchcase(name, tensor) for name in names):
            there = f"{len(names)} tensors, such as {', '.join(names[:6])}"
            raise ChoiceError(f"no tensor matches {tensor!r}; there are {there}")
        chosen = PROTOCOLS.get(options.protocol) or protocol_of(head)
        protocol = replace(chosen, **given)
        text, tables = report(series, protocol, tensor)
        thresholds = " ".join(f"{name}={getattr(protocol, name)}" for name in THRESHOLDS)
        print(f"\n{head['run']}: {head['note'] or head['state']}\n{text}\n\n{thresholds}")
        if options.out is not None and tables:
            out = options.out / Path(head["path"]).resolve().name
            _write(out, tables, alone, protocol, tensor)
    return 0


if __name__ == "__main__":
    cli.run(main)
