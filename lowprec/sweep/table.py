"""The table of a sweep's cells, and a line for each cell that has no result and why."""

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lowprec.sweep.manifest import Ledger
from lowprec.sweep.status import TO_RESUBMIT, State, summary

STYLES = {"finished": "green", "running": "cyan", "failed": "red", "lost": "red"}
STYLES |= {"diverged": "yellow", "cancelled": "dim"}


def show(ledger: Ledger, found: list[State], queue: dict | None, console: Console) -> None:
    """Prints the table, each reason on a line however long it is."""
    console.print(table(ledger, found, queue), soft_wrap=True)


def table(ledger: Ledger, found: list[State], queue: dict | None) -> RenderableType:
    """A row a cell: what it is, how far it came; below it the reasons, and how many of each."""
    shown = Table()
    for name in ("cell", "overrides", "state", "step", "loss", "preempted"):
        shown.add_column(name, overflow="fold")
    names, lines = _names(ledger), []
    for state in found:
        total = ledger.cells[state.index].config["num_steps"]
        shown.add_row(
            str(state.index),
            Text(names[state.index]),
            Text(state.state, STYLES.get(state.state, "")),
            f"{state.step}/{total}",
            "" if state.loss is None else f"{state.loss:.3f}",
            str(state.preempted or ""),
        )
        if state.reason:
            line = f"cell {state.index} ({names[state.index]}) {state.state}: {state.reason}"
            log = ledger.log_of(state.index)
            known = state.state in TO_RESUBMIT and log.exists()
            lines.append(Text(line + (f"; log: {log}" if known else "")))
    if queue is None:
        lines.append(Text("squeue gives no answer: who waits and who runs is as last known"))
    return Group(shown, *lines, Text(summary(found)))


def _names(ledger: Ledger) -> list[str]:
    """What tells each cell from the others: the overrides that not all have."""
    cells = ledger.cells
    shared = set.intersection(*(set(cell.overrides) for cell in cells)) if len(cells) > 1 else set()
    own = [[text for text in cell.overrides if text not in shared] for cell in cells]
    return [" ".join(texts) or cell.label for texts, cell in zip(own, cells, strict=True)]
