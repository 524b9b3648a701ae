"""Long names of methods in the report: cut where they stand beside a plot, whole on hover."""

from analysis import load_runs, report
from analysis.report_plots import TICK, speed
from lowprec.config.schema import OptimizerConfig


def test_a_long_method_is_cut_beside_the_plot_and_whole_in_what_its_dot_says(make_run, tmp_path):
    for seed, (eps, decay) in enumerate([(1e-6, 0.2), (1e-8, 0.1), (1e-7, 0.3)]):
        changed = OptimizerConfig(eps=eps, weight_decay=decay)
        make_run(num_steps=20, optimizer=changed.name, seed=0, batch_size=64 + seed, lr=eps)
    runs = load_runs(tmp_path / "runs")
    heads = report.named(runs.summaries)
    methods = [f"{method}, and more of a very long name" for method in heads["method"]]
    cells = [report.read_cell(runs_of(runs, i), "*", report.Budget(9, 9, 9)) for i in range(3)]
    figure = speed(cells, methods, methods, ["#000000"] * 3)
    ticks = figure.layout.yaxis.ticktext
    assert all(len(tick) == TICK and tick.endswith("\u2026") for tick in ticks)
    told = [text.replace("<br>", " ") for text in figure.data[0].text]
    assert told == methods


def runs_of(runs, i):
    return report.Runs(runs.summaries.iloc[[i]])


def test_a_row_of_a_table_says_its_whole_label_on_hover(make_run, tmp_path):
    make_run(num_steps=20)
    make_run(num_steps=20, lr=4e-3, batch_size=64)
    text = report.make_page(load_runs(tmp_path / "runs"))
    assert 'class="run" title="AdamW (batch_size=64, lr=0.004)' in text
