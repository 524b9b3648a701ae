"""The report's HTML: tables and texts, and around them the page, in which plotly is embedded."""

import base64
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import pandas as pd
from plotly.offline import get_plotlyjs

from analysis import report_plots, report_tables
from analysis.report_cell import AROUND, HIGH, LOW, Budget, Cell
from analysis.report_sweep import Absent
from analysis.spike_marks import in_words
from analysis.style import MODELS

HERE = Path(__file__).parent
MAX_CHIPS = 24  # more methods with settings are joined to their methods
POLICY = (  # the browser, too, refuses to load anything
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)


def page(
    heads: pd.DataFrame,
    cells: list[Cell],
    differing: list[str],
    common: dict,
    tensor: str,
    budget: Budget,
    absent: Sequence[Absent],
) -> str:
    """The whole page. `heads` has a row a cell, with `method`, `variant` and `label`."""
    labels, looks = heads["label"].tolist(), report_plots.looks(heads)
    colors = [color for color, _ in looks]
    methods = heads["method"].tolist()
    if len(set(methods)) > MAX_CHIPS:
        methods = [method.partition(" (")[0] for method in methods]
    chips = list(dict.fromkeys(methods))
    data = {
        "chips": [chips.index(method) for method in methods],
        "labels": labels,
        "around": AROUND,
        "low": LOW,
        "high": HIGH,
        **_heats(cells),
    }
    curves = report_plots.curves(cells, labels, looks)
    speed = report_plots.speed(cells, labels, methods, colors)
    title = _title(heads)
    sections = [
        f"<header><h1>{escape(title)}</h1><p>{_subtitle(heads, absent)}</p></header>",
        report_tables.cards(heads, cells, len(absent)),
        _curves(methods, heads["variant"].tolist(), looks, cells, tensor, budget),
        report_tables.spikes(heads, cells, looks, tensor, budget),
        report_tables.runs(heads, cells, looks, differing),
        _heat_map(labels, cells),
        '<section id="speed"><h2>Speed and memory</h2><div id="speed-plot"></div>',
        report_tables.speed(heads, cells, looks) + "</section>",
        report_tables.failures(heads, cells, looks, absent),
        report_tables.settings(common, cells),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{(HERE / 'report.css').read_text()}</style></head><body><main>",
            *sections,
            "</main>",
            _json("data", data),
            _json("curves-figure", json.loads(curves.to_json())),
            _json("speed-figure", json.loads(speed.to_json())),
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{(HERE / 'report.js').read_text()}</script>",
            "</body></html>\n",
        ]
    )


def _title(heads: pd.DataFrame) -> str:
    studies = heads["experiment"].fillna("runs").astype(str).unique()
    scales = [str(scale) for scale in heads["scale"].dropna().unique()]
    return ", ".join(studies) + (f" ({', '.join(scales)})" if scales else "")


def _subtitle(heads: pd.DataFrame, absent: Sequence[Absent]) -> str:
    states = heads["state"].value_counts()
    counts = ", ".join(f"{count} {escape(str(state))}" for state, count in states.items())
    names = heads.get("model.name", pd.Series(dtype=object)).dropna().unique()
    models = ", ".join(escape(MODELS.get(name, str(name))) for name in names)
    steps = heads.get("num_steps", pd.Series(dtype=float)).dropna()
    told = [f"{len(heads)} {'run' if len(heads) == 1 else 'runs'}: {counts}"]
    told += [f"{len(absent)} of the sweep without a run"] if absent else []
    told += [models] if models else []
    precisions = heads["precision.label"].dropna().unique()
    told += [escape(str(precisions[0]))] if len(precisions) == 1 else []
    if len(steps):
        low, high = int(steps.min()), int(steps.max())
        told.append(f"{low:,} steps" if low == high else f"{low:,} to {high:,} steps")
    return " &middot; ".join(told)


def _curves(
    methods: list[str],
    variants: list[int],
    looks: list,
    cells: list[Cell],
    tensor: str,
    budget: Budget,
) -> str:
    buttons, chips = [], list(dict.fromkeys(methods))
    for i, chip in enumerate(chips):
        members = [run for run, method in enumerate(methods) if method == chip]
        look = looks[min(members, key=lambda run: variants[run])]
        times = f" <small>&times;{len(members)}</small>" if len(members) > 1 else ""
        swatch = report_tables.swatch(look)
        buttons.append(
            f'<button class="chip" data-chip="{i}" aria-pressed="true">{swatch}{escape(chip)}'
            f"{times}</button>"
        )
    thinned = ""
    if any(cell.thinned for cell in cells):
        thinned = (
            f" Curves longer than {budget.points:,} steps are thinned: of each stretch of steps "
            "the smallest and the largest loss and the largest RMS<sub>t</sub> are kept, and every "
            f"step within {AROUND} of a listed spike, so no spike is lost."
        )
    protocols = pd.DataFrame([vars(cell.protocol) for cell in cells])
    return f"""<section id="curves"><h2>Loss and RMS<sub>t</sub></h2>
<div class="chips">{"".join(buttons)}</div>
<div class="tools">
<label>RMS<sub>t</sub> of <select id="which"><option value="rms">{escape(tensor)}</option>
<option value="max">the largest of all recorded tensors</option></select></label>
<label><input type="checkbox" id="smooth" checked> smoothed</label>
<label><input type="checkbox" id="log"> logarithmic loss</label>
<button id="reset">Show everything</button>
<span id="shown" role="status"></span></div>
<div id="curves-plot"></div>
<p class="note">Drag to zoom, double-click to zoom out; click a curve to see its run alone.
&#9660; loss spike; dashed: RMS<sub>t</sub> of an RMS spike.
{escape(in_words(protocols))}{thinned}</p></section>"""


def _heat_map(labels: list[str], cells: list[Cell]) -> str:
    with_heat = [i for i, cell in enumerate(cells) if cell.heat is not None]
    if not with_heat:
        return '<section id="heat"><h2>RMS<sub>t</sub> by layer</h2><p>Not recorded.</p></section>'
    # the run with the most rows has the most to show, and of those one that spiked
    first = max(with_heat, key=lambda i: (len(cells[i].heat.rows), len(cells[i].spikes)))
    options = "".join(
        f'<option value="{i}"{" selected" if i == first else ""}>{escape(labels[i])}'
        f" ({len(cells[i].heat.rows)} rows)</option>"
        for i in with_heat
    )
    return f"""<section id="heat"><h2>RMS<sub>t</sub> by layer</h2>
<div class="tools"><label>Run <select id="heat-run">{options}</select></label></div>
<div id="heat-plot"></div>
<p class="note">The largest RMS<sub>t</sub> of each stretch of steps, and of the tensors of a block
where many are recorded. Above 1 the second moment lags behind the gradient. Dotted: loss spikes.
Click to see a moment in the curves above.</p></section>"""


def _heats(cells: list[Cell]) -> dict:
    """Heat maps as JSON; names of rows and numbers of steps, the same in many runs, once each."""
    shared: list[list] = []

    def place(values: list) -> int:
        if values not in shared:
            shared.append(values)
        return shared.index(values)

    heats = []
    for cell in cells:
        heat = cell.heat and {
            "rows": place([escape(name, quote=False) for name in cell.heat.rows]),
            "steps": place(cell.heat.steps),
            "codes": base64.b64encode(cell.heat.codes.tobytes()).decode(),
            "spikes": cell.spikes["step"].tolist(),
        }
        heats.append(heat)
    return {"heats": heats, "lists": shared}


def _json(name: str, value: object) -> str:
    """Data for the page's script. No `<` in it: nothing in a run's name can end the element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
