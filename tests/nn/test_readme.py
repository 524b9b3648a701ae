"""The README's examples run and print what it says."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from lowprec.clip import open_clip
from lowprec.nn import SwitchBackLinear, apply_recipe

README = Path(__file__).parents[2] / "lowprec" / "nn" / "README.md"


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_open_clip_examples_run(monkeypatch):
    create = partial(open_clip.create_model, load_weights=False, device="meta")
    monkeypatch.setattr(open_clip, "create_model", create)
    text, counts = README.read_text(), []
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        names, printed = {}, io.StringIO()
        device = "cpu" if "advise" in example else "meta"
        monkeypatch.setattr(torch.cuda, "is_available", lambda yes="is_available" in example: yes)
        with torch.device(device), contextlib.redirect_stdout(printed):
            exec(example, names)
        assert f"```\n{printed.getvalue()}" in text
        recipes = [getattr(m, "recipe", None) for m in names["model"].modules()]
        counts.append(sum(recipe is not None and recipe.name == "switchback" for recipe in recipes))
    assert counts == [36, 24, 0]


@pytest.mark.filterwarnings("ignore")
def test_open_clips_replace_linear_takes_our_layer():
    create = partial(open_clip.create_model, "ViT-B-32", load_weights=False, device="meta")
    with torch.device("meta"):
        model = open_clip.utils.replace_linear(create(), SwitchBackLinear)
        layers = [name for name, m in model.named_modules() if isinstance(m, SwitchBackLinear)]
        assert len(layers) == 48 and {n.rpartition(".")[2] for n in layers} == {"c_fc", "c_proj"}
        apply_recipe(model, "switchback")
    recipes = [getattr(m, "recipe", None) for m in model.modules()]
    assert sum(recipe is not None and recipe.name == "switchback" for recipe in recipes) == 72
