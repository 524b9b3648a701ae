"""The README's example runs."""

import re
from functools import partial
from pathlib import Path

import torch

from lowprec.clip import open_clip

README = Path(__file__).parents[2] / "lowprec" / "nn" / "README.md"


def test_open_clip_example_runs(monkeypatch):
    create = partial(open_clip.create_model, load_weights=False, device="meta")
    monkeypatch.setattr(open_clip, "create_model", create)
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    with torch.device("meta"):
        exec(example, names)
    recipes = [getattr(m, "recipe", None) for m in names["model"].modules()]
    assert sum(recipe is not None and recipe.name == "switchback" for recipe in recipes) == 72
