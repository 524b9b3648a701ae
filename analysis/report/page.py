"""Renders the report: plain values for the template page.html.j2, which holds all markup."""

import json
import math
from collections.abc import Sequence
from numbers import Number
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from analysis.comparison import counted
from analysis.load import Runs
from analysis.measures import name_methods
from analysis.report import plots
from analysis.report.collect import AROUND, RunData, collect_run, readable
from analysis.run_files import DEFAULTS, NO_LOSS, NO_TENSORS, OF_RECORDS, read_row_file
from analysis.spike_marks import TENSOR, coinciding_note, describe_protocols
from analysis.style import SMOOTHING
from lowprec.runs.read import ENDED

FOLDER = Path(__file__).parent
TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
POINTS = 72_000  # of all runs, for each of the three curves of a run
MAX_POINTS = 4000  # of one run; with these limits a page has at most about 10 MB
SPIKES = 300  # listed, of all runs
SHOWN, MAX_JPEG = 8, 20_000  # images with their captions, of each run; characters of one
NOT_SETTINGS = {
    *("run", "digest", "path", "state", "step", "reason", "note", "precision.label"),
    *("num_workers", "method", "variant", "label", "group", "name", "run_dir", "data.digest"),
}
RELAXED = ("top5", "_r5", "_r10")  # scores that the table of runs leaves out
STATE_STYLES = {"finished": "good", "diverged": "bad", "failed": "bad", "unknown": "bad"}
SPEED = {  # title and format of each column
    "images_per_s": ("images/s", ",.0f"),
    "data_wait": ("waiting for data", ".1%"),
    "memory_gib": ("GiB", ".2f"),
    "hours": ("hours", ",.2f"),
}


class Field(NamedTuple):
    """A table cell: `kind` selects its markup, and `detail` is a further input of that markup."""

    text: str
    key: float | str  # the table is sorted by it
    kind: str = "text"
    detail: object = ""


NOT_EXAMINED = Field("not examined", "none", "unset")  # a run too short for spikes


def make_page(runs: Runs, tensor: str = TENSOR, refresh: int = 0, planned: Sequence = ()) -> str:
    """The report of some runs as HTML; `tensor` is the glob of those whose RMS_t comes first.

    A browser loads the page again every `refresh` seconds, unless this is 0. `planned`: names of
    the sweep's runs that have not begun.
    """
    points = min(MAX_POINTS, max(100, POINTS // len(runs)))
    num_listed = max(2, SPIKES // len(runs))
    summaries = named(runs.summaries).sort_values("label", kind="stable", ignore_index=True)
    data = [collect_run(runs.only(run), tensor, points, num_listed) for run in summaries["run"]]
    labels, looks = summaries["label"].tolist(), plots.looks(summaries)
    methods, groups = summaries["method"].tolist(), summaries["group"]
    chips = list(dict.fromkeys(methods))
    names = [
        Field(label, label, "run", {"look": look, "hover": f"{label}\n{run}"})
        for label, look, run in zip(labels, looks, summaries["run"], strict=True)
    ]
    differing, shared = compare_settings(summaries)
    tables = _settings(data, groups, looks), _runs(data, names, differing)
    for table in () if _differ(data) else tables:
        _put_best_first(table)
    script = {
        "labels": labels,
        "chips": [chips.index(method) for method in methods],
        "folded": groups.duplicated(keep=False).tolist(),
        "around": AROUND,
    }
    curves, rows = plots.curve_figure(data, labels, looks)
    plots.add_medians(curves, rows, data, groups, looks, points)
    return TEMPLATES.get_template("page.html.j2").render(
        css=Markup((FOLDER / "report.css").read_text()),
        javascript=Markup((FOLDER / "report.js").read_text()),
        plotly=Markup(get_plotlyjs()),
        refresh=refresh,
        smoothing=SMOOTHING,
        title=_title(summaries),
        subtitle=_subtitle(summaries, len(planned)),
        planned=planned,
        cards=_cards(data),
        chips=[(text, looks[methods.index(text)], methods.count(text)) for text in chips],
        protocols=describe_protocols(pd.DataFrame([vars(run.protocol) for run in data])),
        is_thinned=any(len(run.curves) < len(run.whole) for run in data),
        runs_differ=bool(differing) or len(data) == 1,
        num_runs=len(data),
        above=plots.above(data),
        tensor=tensor,
        has_tensor=any(run.whole["rms"].notna().any() for run in data),
        can_replay=any(run.can_replay for run in data),
        points=points,
        around=AROUND,
        unexamined=_unexamined(data),
        is_examined=not all(run.unexamined for run in data),
        spikes=_spikes(data, names, num_listed),
        settings_table=tables[0],
        runs=tables[1],
        failures=_failures(data, names),
        retrieved=[(names[i], rows) for i, run in enumerate(data) if (rows := _retrieved(run))],
        settings=[(key, _field(value, unset="null")) for key, value in shared.items()],
        embedded={"data": script, "curves-figure": json.loads(curves.to_json())},
    )


def named(summaries: pd.DataFrame) -> pd.DataFrame:
    """Adds `method`, `variant`, `label` and `group`, the label of several seeds.

    A run with a damaged config goes by its name.
    """
    if "precision.label" not in summaries:
        summaries = summaries.assign(**{"precision.label": None})
    whole = summaries["precision.label"].notna()
    summaries = summaries.assign(method=summaries["run"], variant=0)
    if whole.any():
        columns = ["method", "variant"]
        summaries.loc[whole, columns] = name_methods(summaries[whole])[columns]
    summaries["label"] = summaries["method"]
    for key, form in (("model.name", ", {}"), ("seed", ", seed {:g}")):
        summaries["group"] = summaries["label"]
        if key in summaries and summaries.loc[whole, key].nunique() > 1:
            summaries.loc[whole, "label"] += summaries.loc[whole, key].map(form.format)
    return summaries


def compare_settings(summaries: pd.DataFrame) -> tuple[list[str], dict[str, object]]:
    """The config keys in which runs differ, and the settings that they share.

    Runs with a damaged config are left out, as are removed keys that no run has set.
    """
    whole = summaries[summaries["precision.label"].notna()]
    differing, shared = [], {}
    for key in whole.columns.difference(NOT_SETTINGS, sort=False):
        if whole[key].map(str).nunique() > 1:
            differing.append(key)
        elif len(whole) and (key in DEFAULTS or whole[key].iloc[0] != OF_RECORDS.get(key)):
            shared[key] = whole[key].iloc[0]
    return differing, shared


def _title(summaries: pd.DataFrame) -> str:
    names = summaries.get("name", pd.Series("runs", index=summaries.index)).fillna("runs")
    experiments = summaries["experiment"].fillna(names).astype(str).unique()
    of_studies = summaries.dropna(subset="experiment")  # watch writes a scale without meaning
    scales = [str(scale) for scale in of_studies["scale"].dropna().unique()]
    return ", ".join(experiments) + (f" ({', '.join(scales)})" if scales else "")


def _subtitle(summaries: pd.DataFrame, num_planned: int) -> str:
    """`3 runs: 2 finished, 1 not begun`."""
    states = [f"{num} {state}" for state, num in summaries["state"].value_counts().items()]
    states += [f"{num_planned} not begun"] if num_planned else []
    return f"{counted(len(summaries) + num_planned, 'run')}: {', '.join(states)}"


def _cards(data: list[RunData]) -> list[tuple[str, str, str, str]]:
    """The numbers at the top of the page: name, value, more, and the section that has them."""
    counts = [len(run.spikes) for run in data if not run.unexamined]
    runs = "runs" if len(counts) == len(data) else "examined runs"
    total, more = f"{sum(counts):,}", f"in {sum(map(bool, counts))} of {len(counts)} {runs}"
    if not counts:
        total, more = "not examined", ""
    num_bad = sum(run.needs_attention for run in data)
    some = "failed, stopped, at chance level or damaged"
    why = some if num_bad else "no run failed, stopped or is damaged, none is at chance level"
    spikes = "loss spikes", total, more, "spikes"
    return [spikes, ("need attention", str(num_bad), why, "failures")]


def _differ(data: list[RunData]) -> bool:
    """Whether runs differ in batch size, data or evaluation: their losses do not compare."""
    rows = [run.summary for run in data]
    return len({(row.get("batch_size"), row.get("data.digest")) for row in rows}) > 1


def _put_best_first(table: dict) -> None:
    """Sorts the rows of a table by the final loss; rows without one come last."""
    if "final loss" in table["titles"]:
        column = table["titles"].index("final loss")
        losses = pd.to_numeric(pd.Series([row["fields"][column].key for row in table["rows"]]))
        table["rows"] = [table["rows"][i] for i in losses.sort_values(kind="stable").index]


def _unexamined(data: list[RunData]) -> list[str]:
    """A sentence for each reason why runs were not examined for spikes, with their steps."""
    texts = []
    for reason in dict.fromkeys(run.unexamined for run in data if run.unexamined):
        steps = [len(run.whole) for run in data if run.unexamined == reason]
        span = " to ".join(f"{number:,}" for number in sorted({min(steps), max(steps)}))
        count = f"{len(steps)} of {len(data)} runs were not examined"
        texts.append(f"{count}: {span} steps are recorded, and {reason}.")
    return texts


def _unrecorded(data: list[RunData]) -> list[str]:
    """A sentence for each way in which runs lack RMS_t of the selected tensor."""
    clauses = [run.unrecorded for run in data if run.unrecorded]
    return [
        f"{text}." if len(data) == 1 else f"In {clauses.count(text)} of {len(data)} runs, {text}."
        for text in dict.fromkeys(clauses)
    ]


def _spikes(data: list[RunData], names: list[Field], num_listed: int) -> dict:
    """The table of loss spikes, the highest first, and counts over all of them."""
    rows = []
    for i, run in enumerate(data):
        for spike in run.spikes.head(num_listed).to_dict("records"):
            step, tensors = spike["step"], spike["tensors"].split() or ["-"]
            more = f" +{len(tensors) - 1}" if len(tensors) > 1 else ""
            lead = "" if pd.isna(spike["lead"]) else int(spike["lead"])
            place = {"step": step, "lead": lead, "id": f"spike-{i}-{step}"}
            fields = [Field(f"step {step:,}", step, "link", place["id"]), names[i]]
            fields += [_field(spike["onset"], ",d")]
            fields += [_field(spike[name], ".3f") for name in ("before", "peak", "height")]
            fields += [_field(spike[name], "d") for name in ("lead", "onset_lead")]
            text = readable(tensors[0]) + more
            fields += [Field(text, tensors[0], "hover", spike["tensors"])]
            rows.append({"run": i, "fields": fields, "height": spike["height"], **place})
    rows.sort(key=lambda row: -row["height"])
    total = sum(len(run.spikes) for run in data)
    spiking = [run for run in data if len(run.spikes) and not run.unrecorded]
    num = sum(len(run.spikes) for run in spiking)
    titles = ["spike", "run", "onset", "loss before", "peak", "height", "lead", "lead to onset"]
    return {
        "table": {"titles": [*titles, "RMS spikes before it in"], "rows": rows},
        "total": total,
        "num": num,
        "coinciding": coinciding_note(sum(run.num_coinciding for run in spiking)),
        "unrecorded": _unrecorded(data),
        "following": sum(run.following["num_following"] for run in spiking),
        "by_onset": sum(run.following["num_by_onset"] for run in spiking),
        "onsets": sum(run.spikes["onset"].nunique() for run in spiking),
        "chance": sum(run.following["chance"] * len(run.spikes) for run in spiking) / max(1, num),
        "max_lead": max(run.protocol.max_lead for run in data),
        "unreachable": sum(run.num_rms_spikes is None and not run.unrecorded for run in data),
    }


def _title_of(score: str) -> str:
    return score.replace("/loss", " loss").rpartition("/")[2].replace("_", " ")


def _form(score: str) -> str:
    return ".4f" if score.endswith("loss") else ".1%"


def _settings(data: list[RunData], groups: pd.Series, looks: list[tuple[str, str]]) -> dict:
    """The table of settings with several seeds: means and standard deviations over these."""
    names = sorted({name for run in data for name in run.scores if not name.endswith(RELAXED)})
    forms = {"final loss": ".4f", **{name: _form(name) for name in names}, "loss spikes": ".1f"}
    rows = []
    for group, members in groups.groupby(groups, sort=False).groups.items():
        runs = [data[i] for i in members]
        values = pd.DataFrame(
            {
                "final loss": run.final_loss,
                **run.scores,
                "loss spikes": math.nan if run.unexamined else len(run.spikes),
            }
            for run in runs
        ).reindex(columns=list(forms))
        detail = {"look": looks[members[0]], "hover": group}
        fields = [Field(group, group, "run", detail), _field(len(runs), "d")]
        for (name, mean), spread in zip(values.mean().items(), values.std(), strict=True):
            field = _field(mean, forms[name])
            more = "" if pd.isna(spread) else f"\u00a0\u00b1\u00a0{format(spread, forms[name])}"
            fields.append(field._replace(text=field.text + more))
        if not (num := int(values["loss spikes"].count())):
            fields[-1] = NOT_EXAMINED
        elif num < len(runs):
            fields[-1] = fields[-1]._replace(text=f"{fields[-1].text} ({num} of {len(runs)} seeds)")
        rows.append({"fields": fields})
    titles = ["setting", "seeds", "final loss", *map(_title_of, names), "loss spikes"]
    return {"titles": titles, "rows": rows if groups.duplicated().any() else []}


def _runs(data: list[RunData], names: list[Field], differing: list[str]) -> dict:
    """The table of runs: results, the settings that differ, and speed."""
    labels = {"precision.recipe": "precision.label"}  # bf16 instead of high
    differing = [labels.get(key, key) for key in differing]
    scores = sorted({name for run in data for name in run.scores if not name.endswith(RELAXED)})
    titles = ["run", "state", "steps", "final loss", *map(_title_of, scores)]
    titles += ["loss spikes", "RMS spikes"]
    rows = []
    for i, run in enumerate(data):
        fields = [names[i], *_progress(run), _field(run.final_loss, ".4f")]
        fields += [_field(run.scores.get(name), _form(name)) for name in scores]
        counts = [_field(len(run.spikes), "d"), _field(run.num_rms_spikes, "d")]
        fields += [NOT_EXAMINED] * 2 if run.unexamined else counts
        unset = "-" if pd.isna(run.summary.get("precision.label")) else "null"  # damaged config
        fields += [_field(run.summary.get(key), unset=unset) for key in differing]
        fields += [_field(run.speed[name], form) for name, (_, form) in SPEED.items()]
        rows.append({"run": i, "fields": fields})
    keys = [key.removesuffix(".name").removesuffix(".label") for key in differing]
    ends = [key.rpartition(".")[2] for key in keys]
    titles += [e if ends.count(e) == 1 else key for key, e in zip(differing, ends, strict=True)]
    titles += [title for title, _ in SPEED.values()]
    filled = [i for i in range(len(titles)) if any(row["fields"][i].key != "" for row in rows)]
    for row in rows:
        row["fields"] = [row["fields"][i] for i in filled]
    titles = [titles[i].replace("_", "_\u200b") for i in filled]  # allows a line break
    return {"titles": titles, "rows": rows}


def _failures(data: list[RunData], names: list[Field]) -> dict:
    """The runs that failed, stopped, are at chance level or damaged, and why."""
    rows = []
    for i, run in enumerate(data):
        if run.needs_attention:
            texts = [str(run.summary["reason"] or ""), run.collapse, run.summary["note"]]
            why = filter(None, texts)
            path = Field(run.summary["path"], run.summary["path"], "code")
            fields = [names[i], *_progress(run), _field("; ".join(why) or None), path]
            rows.append({"run": i, "fields": fields})
    return {"titles": ["run", "state", "steps", "reason", "path"], "rows": rows}


def _retrieved(run: RunData) -> list[dict]:
    """The rows of retrieved.jsonl that are whole: an image, its caption and the nearest ones."""
    rows, _ = read_row_file(run.summary, "retrieved")
    rows = [row for row in rows if {"jpeg", "caption", "nearest"} <= row.keys()]
    return [row for row in rows if len(row["jpeg"]) < MAX_JPEG][:SHOWN]


def _progress(run: RunData) -> list[Field]:
    """The state of a run and its last step with a row."""
    state = str(run.summary["state"])
    style = STATE_STYLES.get(state, "warn")
    if state in ENDED and run.summary["note"] not in ("", NO_LOSS, NO_TENSORS):
        state, style = f"{state}, damaged", "bad" if style == "bad" else "warn"
    elif run.verdict:
        state = f"{state}, {run.verdict}"
        style = "bad" if run.verdict == "collapsed" else "warn"
    steps = run.curves["step"].max() if len(run.curves) else 0
    return [Field(state, state, "state", style), _field(steps, ",d")]


def _field(value: object, form: str = "", unset: str = "-") -> Field:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return Field(unset, "", "unset")
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    is_number = isinstance(value, Number) and not isinstance(value, bool)
    text = format(value, form or ("g" if isinstance(value, float) else "")) if is_number else value
    return Field(str(text), value if is_number else str(value))
