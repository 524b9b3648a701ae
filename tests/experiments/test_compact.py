"""A folder of runs is copied completely or not at all."""

import pandas as pd
import pytest

from experiments.compact import CompactConfig, main
from tests.analysis.conftest import make_run


@pytest.fixture
def folder(tmp_path):
    """Two runs of which the second, in order of their names, recorded another tensor alone."""
    for model, tensor in (("mini_b", "visual.conv1.weight"), ("mini_l", "visual.proj")):
        rms = pd.DataFrame({tensor: [1.0] * 20}, index=range(1, 21))
        make_run(tmp_path / "runs", model=model, num_steps=20, tables={"tensors": {"rms": rms}})
    return tmp_path / "runs"


def damage(folder):
    run = sorted(folder.glob("*/*"))[-1]
    (run / "tensors.parquet").write_bytes(b"PAR1 no")


@pytest.mark.parametrize(
    ("tensors", "change", "why"),
    [
        (["visual.conv1.weight"], None, "mini_l.*none of its tensors"),
        (["*"], damage, "mini_l.*damaged"),
    ],
)
def test_nothing_is_copied_if_one_run_cannot_be(folder, tmp_path, tensors, change, why):
    if change:
        change(folder)
    with pytest.raises(SystemExit, match=why):
        main(CompactConfig(run=str(folder), out=str(tmp_path / "out"), tensors=tensors))
    assert not (tmp_path / "out").exists()


def test_each_run_is_copied_with_the_selected_tensors(folder, tmp_path):
    main(CompactConfig(run=str(folder), out=str(tmp_path / "out"), tensors=["visual.*"]))
    assert len(list((tmp_path / "out").glob("*/*/tensors.parquet"))) == 2
