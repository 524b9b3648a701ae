"""The tables of the report as HTML. Everything that comes from a run is escaped."""

from collections.abc import Sequence
from html import escape

import numpy as np
import pandas as pd

from analysis.report_cell import Budget, Cell
from analysis.report_sweep import Absent
from lowprec.runs.read import ENDED

SHOWN_STATES = {"finished": "good", "diverged": "bad", "failed": "bad", "unknown": "bad"}


def swatch(look: tuple[str, str]) -> str:
    """A short line in a run's color and dash."""
    color, dashes = look
    pattern = "" if dashes == "solid" else f' stroke-dasharray="{dashes.replace("px", "")}"'
    return (
        '<svg class="swatch" width="26" height="8" aria-hidden="true"><line x1="1" x2="25" y1="4" '
        f'y2="4" stroke="{color}" stroke-width="3"{pattern}/></svg>'
    )


def cards(heads: pd.DataFrame, cells: list[Cell], num_absent: int) -> str:
    """What a reader wants to know first, a number each. `num_absent`: cells without a run."""
    shown = []
    losses = [cell.final_loss for cell in cells]
    finished = [i for i, cell in enumerate(cells) if cell.head["state"] == "finished"]
    known = [i for i in finished if np.isfinite(losses[i])]
    if known:
        best = min(known, key=lambda i: losses[i])
        label = heads["label"].iloc[best]
        shown.append(("lowest final loss", f"{losses[best]:.3f}", label, "runs"))
    for name in sorted({name for cell in cells for name in cell.scores})[:2]:
        scored = [i for i in range(len(cells)) if name in cells[i].scores]
        best = max(scored, key=lambda i: cells[i].scores[name])
        value = cells[best].scores[name]
        shown.append((f"best {name}", _score(value), heads["label"].iloc[best], "runs"))
    count = sum(len(cell.spikes) for cell in cells)
    spiking = sum(len(cell.spikes) > 0 for cell in cells)
    shown.append(("loss spikes", f"{count:,}", f"in {spiking} of {len(cells)} runs", "spikes"))
    rates = [cell.speed["images_per_s"] for cell in cells]
    if np.isfinite(rates).any():
        low, high = np.nanmin(rates), np.nanmax(rates)
        spread = "" if len(cells) == 1 else f"slowest {low:,.0f}"
        shown.append(("images per second", f"{high:,.0f}", spread, "speed"))
    bad = sum(needs_attention(cell) for cell in cells) + num_absent
    told = "failed, unfinished or damaged" if bad else "every run finished and is whole on disk"
    shown.append(("need attention", str(bad), told, "failures"))
    boxes = [
        f'<a class="card{" bad" if name == "need attention" and bad else ""}" href="#{link}">'
        f"<span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(str(more))}</small></a>"
        for name, value, more, link in shown
    ]
    return f'<div class="cards">{"".join(boxes)}</div>'


def runs(heads: pd.DataFrame, cells: list[Cell], looks: list, differing: list[str]) -> str:
    """A row a run: what differs in its config, and what came out."""
    scores = sorted({name for cell in cells for name in cell.scores})
    short = _short_keys(differing)
    titles = ["run", "state", "steps", "final loss", *scores, "loss spikes", "RMS spikes"]
    titles += [short[key] for key in differing]
    rows = []
    for i, cell in enumerate(cells):
        values = [_run(heads, looks, i)]
        values += [_state(cell), _number(_last_step(cell), ",.0f"), _number(cell.final_loss, ".4f")]
        values += [_number(cell.scores.get(name, np.nan), ".4f") for name in scores]
        values += [_number(len(cell.spikes), "d"), _number(cell.num_rms_spikes, "d")]
        values += [_setting(cell.head.get(key)) for key in differing]
        rows.append((f'data-run="{i}"', values))
    same = "" if differing or len(cells) == 1 else " Their configs are the same."
    return (
        '<section id="runs"><h2>Runs</h2><p class="note">What came out, and the settings that '
        f"differ.{same} Click a heading to sort, a row to see that run alone in the curves. Final "
        f"loss: mean of the last steps.</p>{_table(titles, rows, 'tall')}</section>"
    )


def spikes(heads: pd.DataFrame, cells: list[Cell], looks: list, tensor: str, budget: Budget) -> str:
    """A row a loss spike, with a link that zooms the curves to it."""
    total = sum(len(cell.spikes) for cell in cells)
    head = '<section id="spikes"><h2>Loss spikes</h2>'
    if not total:
        return f"{head}<p>None.</p></section>"
    rows = []
    for i, cell in enumerate(cells):
        for spike in cell.spikes.head(budget.spikes).to_dict("records"):
            step, lead = spike["step"], spike["lead"]
            first, *others = spike["tensors"].split() or ["-"]
            more = f" +{len(others)}" if others else ""
            place = f"spike-{i}-{step}"
            values = [
                (f'<a href="#{place}">step {step:,}</a>', step),
                _run(heads, looks, i),
                *(_number(spike[name], ".3f") for name in ("before", "peak", "height")),
                _number(np.nan if pd.isna(lead) else int(lead), "d"),
                (f'<span title="{escape(spike["tensors"])}">{escape(first)}{more}</span>', first),
            ]
            about = f'data-run="{i}" data-step="{step}" data-lead="{"" if pd.isna(lead) else lead}"'
            rows.append((f'id="{place}" {about}', values))
    rows.sort(key=lambda row: -row[1][4][1])
    after = sum(cell.following.num_following for cell in cells)
    chance = sum(cell.following.chance * len(cell.spikes) for cell in cells if len(cell.spikes))
    left_out = f" The highest {len(rows):,} of {total:,} are listed." if len(rows) < total else ""
    most = max(cell.protocol.max_lead for cell in cells)
    titles = ["spike", "run", "loss before", "peak", "height", "lead", "RMS spikes before it in"]
    return (
        f"{head}<p><b>{after} of {total}</b> come 1 to {most} steps after an RMS spike of "
        f"{escape(tensor)} ({chance / total:.1%} would by chance).{left_out}</p>"
        '<p class="note">Click one to zoom the curves to its moment. Lead: steps since the latest '
        "such RMS spike. To train through one again with a change: <code>python -m "
        "experiments.replay run=DIR step=N optimizer.beta2=0.95</code></p>"
        f"{_table(titles, rows, 'tall')}</section>"
    )


def speed(heads: pd.DataFrame, cells: list[Cell], looks: list) -> str:
    """A row a run; medians."""
    titles = ["run", "images/s", "step, ms", "waiting for data", "memory, GiB", "hours", "attempts"]
    forms = {"images_per_s": ",.0f", "step_ms": ",.1f", "data_wait": ".1%", "memory_gib": ".2f",
             "hours": ",.2f", "attempts": "d"}  # fmt: skip
    rows = []
    for i, cell in enumerate(cells):
        numbers = [_number(cell.speed[name], form) for name, form in forms.items()]
        rows.append((f'data-run="{i}"', [_run(heads, looks, i), *numbers]))
    return (
        f'{_table(titles, rows, "tall")}<p class="note">Medians over the run; memory is the '
        "largest. Hours are of all attempts, with compiling and evaluation.</p>"
    )


def failures(heads: pd.DataFrame, cells: list[Cell], looks: list, absent: Sequence[Absent]) -> str:
    """A row a run that did not finish or is damaged on disk, and a cell without a run: why."""
    rows = []
    for i, cell in enumerate(cells):
        if needs_attention(cell):
            why = "; ".join(filter(None, [str(cell.head["reason"] or ""), cell.head["note"]]))
            values = [_run(heads, looks, i), _state(cell), _number(_last_step(cell), ",.0f")]
            rows.append((f'data-run="{i}"', [*values, _text(why), _path(cell.head["path"])]))
    for cell in absent:
        kind = SHOWN_STATES.get(cell.state, "warn")
        state = f'<span class="state {kind}">{escape(cell.state)}, no run</span>', cell.state
        values = [_text(cell.name), state, _number(0, "d"), _text(cell.why), _path(cell.where)]
        rows.append(("", values))
    head = '<section id="failures"><h2>Failures and damage</h2>'
    if not rows:
        return f"{head}<p>None: every run finished and is whole on disk.</p></section>"
    return f"{head}{_table(['run', 'state', 'steps', 'why', 'where'], rows)}</section>"


def needs_attention(cell: Cell) -> bool:
    """Whether a run did not finish, or is damaged on disk."""
    return cell.head["state"] != "finished" or bool(cell.head["note"])


def settings(common: dict, cells: list[Cell]) -> str:
    """The settings that all runs share."""
    items = "".join(
        f"<tr><th>{escape(key)}</th><td>{_setting(value)[0]}</td></tr>"
        for key, value in common.items()
    )
    what = "settings all runs have in common" if len(cells) > 1 else "settings"
    return (
        f'<section id="settings"><details><summary>{len(common)} {what}</summary>'
        f'<div class="scroll"><table class="settings">{items}</table></div></details></section>'
    )


def _table(titles: list[str], rows: list[tuple[str, list]], kind: str = "") -> str:
    """Rows are (attributes, cells); a cell is (HTML, what it is sorted by)."""
    head = "".join(f'<th scope="col"><button>{escape(title)}</button></th>' for title in titles)
    body = []
    for attributes, values in rows:
        cells = ""
        for html, key in values:
            number = " class=number" if isinstance(key, float | int) else ""
            cells += f'<td{number} data-key="{escape(str(key))}">{html}</td>'
        body.append(f"<tr {attributes}>{cells}</tr>")
    return (
        f'<div class="scroll {kind}"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _run(heads: pd.DataFrame, looks: list, i: int) -> tuple[str, str]:
    label, name = heads["label"].iloc[i], escape(str(heads["run"].iloc[i]))
    shown = escape(label)
    return f'<span class="run" title="{shown}\n{name}">{swatch(looks[i])}{shown}</span>', label


def _state(cell: Cell) -> tuple[str, str]:
    state = str(cell.head["state"])
    kind = "warn" if state == "finished" and cell.head["note"] else SHOWN_STATES.get(state, "warn")
    told = f"{state}, damaged" if state in ENDED and cell.head["note"] else state
    return f'<span class="state {kind}">{escape(told)}</span>', state


def _text(text: str) -> tuple[str, str]:
    return escape(text) or "-", text


def _path(path: str) -> tuple[str, str]:
    return f"<code>{escape(path)}</code>", path


def _last_step(cell: Cell) -> float:
    return float(cell.curves["step"].max()) if len(cell.curves) else 0.0


def _number(value: float, form: str) -> tuple[str, float]:
    return ("-" if not np.isfinite(value) else format(value, form)), value


def _setting(value: object) -> tuple[str, object]:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return '<span class="unset">-</span>', ""
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    key = value if isinstance(value, float | int) and not isinstance(value, bool) else text
    return escape(text), key


def _score(value: float) -> str:
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"


def _short_keys(keys: list[str]) -> dict[str, str]:
    """`beta2` of `optimizer.beta2` where no other key ends so, but `optimizer` of its `.name`."""
    last = {key: key.removesuffix(".name").rpartition(".")[2] for key in keys}
    ends = list(last.values())
    return {key: short if ends.count(short) == 1 else key for key, short in last.items()}
