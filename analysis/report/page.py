"""Renders the report: plain values for the template page.html.j2, which holds all markup."""

import base64
import json
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis.curves import name_methods
from analysis.load import Runs
from analysis.report import plots
from analysis.report.collect import AROUND, HIGH, LOW, Budget, RunData, collect_run
from analysis.spike_marks import TENSOR, in_words
from analysis.style import model
from lowprec.runs.read import ENDED

FOLDER = Path(__file__).parent
POINTS = 36_000  # of all runs, for each of the three curves of a run
MAX_POINTS = 4000  # of one run
SPIKES = 300  # listed, of all runs
HEAT_BYTES = 900_000
NOT_SETTINGS = {
    *("run", "digest", "path", "state", "step", "reason", "note", "precision.label"),
    *("method", "variant", "label", "name", "run_dir", "data.digest"),
}
STATE_STYLES = {"finished": "good", "diverged": "bad", "failed": "bad", "unknown": "bad"}
SPEED = {  # title and format of each column
    "images_per_s": ("images/s", ",.0f"),
    "step_ms": ("step, ms", ",.1f"),
    "data_wait": ("waiting for data", ".1%"),
    "memory_gib": ("memory, GiB", ".2f"),
    "hours": ("hours", ",.2f"),
    "attempts": ("attempts", "d"),
}


class Field(NamedTuple):
    """A table cell: `kind` selects its markup, and `detail` is a further input of that markup."""

    text: str
    key: float | str  # the table is sorted by it
    kind: str = "text"
    detail: object = ""


def make_page(runs: Runs, tensor: str = TENSOR) -> str:
    """The report of some runs as HTML.

    Args:
        runs: what `load_runs` returns.
        tensor: glob of the tensors whose RMS_t is shown first.
    """
    budget = Budget(
        points=min(MAX_POINTS, max(100, POINTS // len(runs))),
        spikes=max(2, SPIKES // len(runs)),
        heat_bytes=HEAT_BYTES // len(runs),
    )
    data = [collect_run(runs.only(run), tensor, budget) for run in runs.summaries["run"]]
    summaries = named(runs.summaries)
    labels, looks = summaries["label"].tolist(), plots.looks(summaries)
    methods = summaries["method"].tolist()
    names = [
        Field(label, label, "run", {"look": look, "hover": f"{label}\n{run}"})
        for label, look, run in zip(labels, looks, summaries["run"], strict=True)
    ]
    differing = differences(summaries)
    curves = plots.curve_figure(data, labels, looks)
    speed = plots.speed_figure(data, labels, methods, [color for color, _ in looks])
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        css=Markup((FOLDER / "report.css").read_text()),
        javascript=Markup((FOLDER / "report.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        title=_title(summaries),
        subtitle=_subtitle(summaries),
        cards=_cards(labels, data),
        chips=_chips(methods, looks),
        protocols=in_words(pd.DataFrame([vars(run.protocol) for run in data])),
        is_thinned=any(run.is_thinned for run in data),
        runs_differ=bool(differing) or len(data) == 1,
        num_runs=len(data),
        tensor=tensor,
        budget=budget,
        around=AROUND,
        spikes=_spikes(data, names, budget),
        runs=_runs(data, names, differing),
        heats=_heat_options(labels, data),
        speed=_speed(data, names),
        failures=_failures(data, names),
        settings=[(key, _setting(value)) for key, value in common(summaries).items()],
        embedded={
            "data": _script_data(labels, methods, data),
            "curves-figure": json.loads(curves.to_json()),
            "speed-figure": json.loads(speed.to_json()),
        },
    )


def named(summaries: pd.DataFrame) -> pd.DataFrame:
    """Adds `method`, `variant` and `label`; a run with a damaged config goes by its name."""
    if "precision.label" not in summaries:
        summaries = summaries.assign(**{"precision.label": None})
    whole = summaries["precision.label"].notna()
    summaries = summaries.assign(method=summaries["run"], variant=0)
    if whole.any():
        columns = ["method", "variant"]
        summaries.loc[whole, columns] = name_methods(summaries[whole])[columns]
    if summaries.loc[whole, "precision.label"].nunique() == 1:  # no need to repeat it
        methods = summaries.loc[whole, "method"]
        summaries.loc[whole, "method"] = methods.str.partition(", ")[2]
    summaries["label"] = summaries["method"]
    for key, form in (("model.name", ", {}"), ("seed", ", seed {:g}")):
        if key in summaries and summaries.loc[whole, key].nunique() > 1:
            summaries.loc[whole, "label"] += summaries.loc[whole, key].map(form.format)
    return summaries


def differences(summaries: pd.DataFrame) -> list[str]:
    """The config keys in which runs differ, damaged configs left out."""
    whole = summaries[summaries["precision.label"].notna()]
    keys = [key for key in whole if key not in NOT_SETTINGS]
    return [key for key in keys if whole[key].map(str).nunique() > 1]


def common(summaries: pd.DataFrame) -> dict[str, object]:
    """The settings that all of these runs share."""
    whole = summaries[summaries["precision.label"].notna()]
    keys = [key for key in whole if key not in NOT_SETTINGS.union(differences(summaries))]
    return {key: whole[key].iloc[0] for key in keys} if len(whole) else {}


def _title(summaries: pd.DataFrame) -> str:
    experiments = summaries["experiment"].fillna("runs").astype(str).unique()
    scales = [str(scale) for scale in summaries["scale"].dropna().unique()]
    return ", ".join(experiments) + (f" ({', '.join(scales)})" if scales else "")


def _subtitle(summaries: pd.DataFrame) -> list[str]:
    """`9 runs: 8 finished, 1 failed`, the models and the numbers of steps."""
    counts = ", ".join(f"{num} {state}" for state, num in summaries["state"].value_counts().items())
    models = summaries.get("model.name", pd.Series(dtype=object)).dropna().unique()
    steps = summaries.get("num_steps", pd.Series(dtype=float)).dropna().unique()
    return [
        f"{len(summaries)} {'run' if len(summaries) == 1 else 'runs'}: {counts}",
        *([", ".join(model(str(name)) for name in models)] if len(models) else []),
        *([f"{' and '.join(f'{num:,.0f}' for num in sorted(steps))} steps"] if len(steps) else []),
    ]


def _cards(labels: list[str], data: list[RunData]) -> list[dict]:
    """The numbers at the top of the page."""
    cards = []

    def add(name: str, value: str, more: str, link: str, is_bad: bool = False) -> None:
        cards.append({"name": name, "value": value, "more": more, "link": link, "bad": is_bad})

    finished = [i for i, run in enumerate(data) if run.summary["state"] == "finished"]
    measured = [i for i in finished if np.isfinite(data[i].final_loss)]
    if measured:
        best = min(measured, key=lambda i: data[i].final_loss)
        add("lowest final loss", f"{data[best].final_loss:.3f}", labels[best], "runs")
    for name in sorted({name for run in data for name in run.scores})[:2]:
        scored = [i for i, run in enumerate(data) if name in run.scores]
        best = max(scored, key=lambda i: data[i].scores[name])
        value = data[best].scores[name]
        text = f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"
        add(f"best {name}", text, labels[best], "runs")
    spiking = sum(len(run.spikes) > 0 for run in data)
    count = sum(len(run.spikes) for run in data)
    add("loss spikes", f"{count:,}", f"in {spiking} of {len(data)} runs", "spikes")
    rates = [run.speed["images_per_s"] for run in data]
    if np.isfinite(rates).any():
        slowest = "" if len(data) == 1 else f"slowest {np.nanmin(rates):,.0f}"
        add("images per second", f"{np.nanmax(rates):,.0f}", slowest, "speed")
    bad = sum(run.needs_attention for run in data)
    more = "failed, unfinished or damaged" if bad else "every run finished and is whole on disk"
    add("need attention", str(bad), more, "failures", bad > 0)
    return cards


def _chips(methods: list[str], looks: list) -> list[dict]:
    """The buttons that show and hide methods: text, look and number of runs."""
    chips = []
    for method in dict.fromkeys(methods):
        members = [i for i, name in enumerate(methods) if name == method]
        chips.append({"text": method, "look": looks[members[0]], "count": len(members)})
    return chips


def _spikes(data: list[RunData], names: list[Field], budget: Budget) -> dict:
    """The table of loss spikes, the highest first, and counts over all of them."""
    rows = []
    for i, run in enumerate(data):
        for spike in run.spikes.head(budget.spikes).to_dict("records"):
            step, tensors = spike["step"], spike["tensors"].split() or ["-"]
            more = f" +{len(tensors) - 1}" if len(tensors) > 1 else ""
            lead, onset_lead = (
                np.nan if pd.isna(spike[name]) else int(spike[name])
                for name in ("lead", "onset_lead")
            )
            place = f"spike-{i}-{step}"
            fields = [Field(f"step {step:,}", step, "link", place), names[i]]
            fields += [_number(spike["onset"], ",d")]
            fields += [_number(spike[name], ".3f") for name in ("before", "peak", "height")]
            fields += [_number(lead, ".0f"), _number(onset_lead, ".0f")]
            fields += [Field(tensors[0] + more, tensors[0], "hover", spike["tensors"])]
            about = {"step": step, "lead": "" if np.isnan(lead) else lead, "id": place}
            rows.append({"run": i, "fields": fields, "height": spike["height"], **about})
    rows.sort(key=lambda row: -row["height"])
    total = sum(len(run.spikes) for run in data)
    spiking = [run for run in data if len(run.spikes)]
    titles = ["spike", "run", "onset", "loss before", "peak", "height", "lead", "lead to onset"]
    return {
        "table": {"titles": [*titles, "RMS spikes before it in"], "rows": rows},
        "total": total,
        "following": sum(run.following["num_following"] for run in spiking),
        "by_onset": sum(run.following["num_by_onset"] for run in spiking),
        "onsets": sum(run.spikes["onset"].nunique() for run in spiking),
        "chance": sum(run.following["chance"] * len(run.spikes) for run in spiking) / max(1, total),
        "max_lead": max(run.protocol.max_lead for run in data),
        "unreachable": sum(not run.reaches_threshold for run in data),
    }


def _runs(data: list[RunData], names: list[Field], differing: list[str]) -> dict:
    """The table of runs: results, and the settings that differ."""
    scores = sorted({name for run in data for name in run.scores})
    titles = ["run", "state", "steps", "final loss", *scores, "loss spikes", "RMS spikes"]
    rows = []
    for i, run in enumerate(data):
        fields = [names[i], _state(run), _number(run.last_step, ",d")]
        fields += [_number(run.final_loss, ".4f")]
        fields += [_number(run.scores.get(name, np.nan), ".4f") for name in scores]
        num_rms = _number(run.num_rms_spikes, "d")
        if not run.reaches_threshold:
            num_rms = Field("-", "", "hover", "RMS_t cannot reach the threshold at this beta2")
        fields += [_number(len(run.spikes), "d"), num_rms]
        fields += [_setting(run.summary.get(key)) for key in differing]
        rows.append({"run": i, "fields": fields})
    return {"titles": [*titles, *_short_keys(differing)], "rows": rows}


def _speed(data: list[RunData], names: list[Field]) -> dict:
    rows = []
    for i, run in enumerate(data):
        numbers = [_number(run.speed[name], form) for name, (_, form) in SPEED.items()]
        rows.append({"run": i, "fields": [names[i], *numbers]})
    return {"titles": ["run", *(title for title, _ in SPEED.values())], "rows": rows}


def _failures(data: list[RunData], names: list[Field]) -> dict:
    """The runs that did not finish or are damaged, and why."""
    rows = []
    for i, run in enumerate(data):
        if run.needs_attention:
            parts = [str(run.summary["reason"] or ""), run.summary["note"]]
            reason, path = "; ".join(filter(None, parts)), run.summary["path"]
            fields = [names[i], _state(run), _number(run.last_step, ",d")]
            fields += [Field(reason or "-", reason), Field(path, path, "code")]
            rows.append({"run": i, "fields": fields})
    return {"titles": ["run", "state", "steps", "reason", "path"], "rows": rows}


def _heat_options(labels: list[str], data: list[RunData]) -> list[dict]:
    """The runs with a heat map; the one with the most rows, then spikes, is selected."""
    options = [
        {"run": i, "label": labels[i], "rows": len(run.heat.rows), "spikes": len(run.spikes)}
        for i, run in enumerate(data)
        if run.heat is not None
    ]
    first = max(options, key=lambda option: (option["rows"], option["spikes"]), default=None)
    return [{**option, "selected": option is first} for option in options]


def _script_data(labels: list[str], methods: list[str], data: list[RunData]) -> dict:
    """Data for report.js; row names and steps, which many heat maps share, appear once each."""
    chips, lists = list(dict.fromkeys(methods)), []

    def index_of(values: list) -> int:
        if values not in lists:
            lists.append(values)
        return lists.index(values)

    heats = [
        run.heat
        and {
            "rows": index_of([escape(name, quote=False) for name in run.heat.rows]),
            "steps": index_of(run.heat.steps),
            "codes": base64.b64encode(run.heat.codes.tobytes()).decode(),
            "spikes": run.spikes["step"].tolist(),
        }
        for run in data
    ]
    numbers = {"around": AROUND, "low": LOW, "high": HIGH}
    chip_of = [chips.index(method) for method in methods]
    return {"labels": labels, "chips": chip_of, "heats": heats, "lists": lists, **numbers}


def _state(run: RunData) -> Field:
    state, is_damaged = str(run.summary["state"]), bool(run.summary["note"])
    style = STATE_STYLES.get(state, "warn")
    if state in ENDED and is_damaged:
        return Field(f"{state}, damaged", state, "state", "bad" if style == "bad" else "warn")
    return Field(state, state, "state", style)


def _number(value: float, form: str) -> Field:
    return Field(format(value, form) if np.isfinite(value) else "-", value)


def _setting(value: object) -> Field:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return Field("-", "", "unset")
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return Field(text, value if is_number else text)


def _short_keys(keys: list[str]) -> list[str]:
    """`beta2` for `optimizer.beta2` if no other key ends so, but `optimizer` for its `.name`."""
    ends = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]
