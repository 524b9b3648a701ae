"""The notebooks are short, come without outputs, and run on the committed records."""

import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_CELLS = 12
STUDY = '"stability_mini"'  # of 01_compare_methods, which takes any
STUDIES = ("optimizers_mini", "accuracy_vs_size_mini")


def test_listed_notebooks_are_those_that_exist():
    listed = re.findall(r"\(([\w]+)\.ipynb\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_short_and_has_links_with_targets_and_no_outputs(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    assert 2 <= len(cells) <= MOST_CELLS
    for cell in cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        headings = re.findall(r"^#+ (.+)$", (FOLDER / file).read_text(), re.M)
        assert not anchor or anchor in [h.lower().replace(" ", "-") for h in headings], link
    assert set(re.findall(r"`(\d\d_\w+)`", text)) <= set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_all_that_a_notebook_imports_from_the_project_exists(name):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for line in re.findall(r"^from (?:analysis|experiments|lowprec)\b.* import .*", code, re.M):
        exec(line, {})


@pytest.mark.filterwarnings("default")  # of the packages that run notebooks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "study"),
    [(name, "") for name in NOTEBOOKS] + [("01_compare_methods", study) for study in STUDIES],
)
def test_notebook_runs_and_draws(name, study, monkeypatch):
    import ipykernel  # noqa: F401  the kernel: without it, or them, this fails and is not skipped
    import nbclient
    import nbformat

    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    if study:
        assert notebook.cells[1].source.count(STUDY) == 1
        notebook.cells[1].source = notebook.cells[1].source.replace(STUDY, f'"{study}"')
    there = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=200, resources=there).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    errors = [output["text"] for output in outputs if output.get("name") == "stderr"]
    assert errors == []
    assert sum("image/png" in output.get("data", ()) for output in outputs) >= 1
