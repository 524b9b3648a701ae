"""The figure of all tensors whose RMS spikes come before loss spikes, on planted ones."""

from analysis.figures import leads
from analysis.figures import tensors_before_spikes as FIGURE
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig
from tests.analysis.conftest import drawn, spiking, write_rows

SPIKES = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=50, window=50))
EVENTS = {  # step: tensors with an RMS spike; the loss spikes at 200 and 300
    20: ["ignored"],
    194: ["early"],
    197: ["early", "late"],
    298: ["late"],
    120: ["alone"],
}


def test_tensors_are_counted_from_the_onset_and_the_earliest_is_first(make_run, query):
    losses = spiking(400, (200, 300))
    for settings in ({}, {"beta2": 0.5, "beta2_decay": 0.8}):  # a schedule ends above 0.99
        run = make_run(num_steps=400, losses=losses, diagnostics=SPIKES, **settings)
        rows = [
            {"step": step, "spike": "rms", "rms": dict.fromkeys(names, 3.0)}
            for step, names in EVENTS.items()
        ]
        write_rows(run / "events.jsonl", rows)
    make_run(beta2=0.5, num_steps=400, losses=losses, diagnostics=SPIKES)  # RMS_t stays below 2.3
    frame = query(FIGURE)
    table = leads.pooled(frame)
    counts = table[["num_loss_spikes", "num_rms_spikes", "num_following", "num_first"]]
    expected = {"late": [4, 4, 4, 2], "early": [4, 4, 2, 2], "alone": [4, 2, 0, 0]}
    assert counts.astype(int).T.to_dict("list") == expected
    chance = 2 * 8 / 350  # 8 steps after each of 2 spikes, of the steps that are not ignored
    assert abs(table.loc["late", "chance"] - chance) < 0.01
    assert (table["q"] >= table["p"]).all() and table.index[0] == "late"
    (ax,) = drawn(FIGURE, frame)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["alone", "early", "late"]
    assert "late: 4 of 4 follow its 4 RMS spikes" in FIGURE.caption(frame)
