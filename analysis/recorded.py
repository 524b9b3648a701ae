"""Statistics of a run's tensors and blocks by name, for figures that show a few of them."""

import pandas as pd

from analysis.load import Runs

BLOCK = "visual.transformer.resblocks.{}"
PAPER_BLOCKS, PAPER_DEPTH = (0, 10, 20, 30), 32  # the blocks shown of ViT-H/14


def of_run(runs: Runs, run: str) -> Runs:
    """One run alone, so that no other run's files are read."""
    return Runs(runs.heads[runs.heads["run"] == run])


def series(alone: Runs, name: str, stat: str) -> pd.Series:
    """One statistic of one tensor or block of one run by step; empty where it is not recorded."""
    try:
        frame = alone.tensors(name, stat)
    except LookupError:
        return pd.Series(dtype=float, index=pd.Index([], name="step", dtype=int))
    return frame.drop_duplicates("step", keep="last").set_index("step")[name].astype(float)


def shown_blocks(depth: float) -> list[int]:
    """Blocks of the vision tower as deep in it as the paper's 0, 10, 20, 30 of ViT-H's 32.

    Of an unknown depth (a model of open_clip's own) only the first.
    """
    depth = 1 if pd.isna(depth) else int(depth)
    return sorted({block * depth // PAPER_DEPTH for block in PAPER_BLOCKS})
