"""The README's example runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "lowprec" / "nn" / "README.md"


@pytest.mark.filterwarnings("ignore")  # from open_clip, about missing pretrained weights
def test_open_clip_example_runs():
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {}
    exec(example, names)
    recipes = [getattr(m, "recipe", None) for m in names["model"].modules()]
    assert sum(recipe is not None and recipe.name == "switchback" for recipe in recipes) == 72
