"""Provenance: a reworded comment never counts, a changed number does."""

import pytest

from lowprec.runs.provenance import CODE, MEASURING, ROOT, changes, code_digest, code_digests

SOURCE = '''"""A module."""

BETA = 0.9  # of the moments


class Rule:
    """A rule."""

    def apply(self, x: float) -> float:
        """Applies the rule."""
        return x * BETA + 1
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# of the moments", "# for both moments"),
        ('"""A module."""', '"""Another\n\ntext."""'),
        ('    """A rule."""\n\n', ""),
        ('"""Applies the rule."""', '"""Scales."""'),
        ("x * BETA + 1", "(\n            x * BETA  # scaled\n            + 1\n        )"),
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(old, new):
    assert old in SOURCE and code_digest(SOURCE.replace(old, new)) == code_digest(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"), [("0.9", "0.95"), ("x * BETA + 1", "x * (BETA + 1)"), ("apply", "call")]
)
def test_changed_numbers_operations_and_names_count(old, new):
    assert old in SOURCE and code_digest(SOURCE.replace(old, new)) != code_digest(SOURCE)


def test_code_on_the_way_of_a_step_counts_and_nothing_else():
    for pattern in CODE:
        assert list(ROOT.glob(pattern)), pattern
    paths = set(code_digests())
    steps = ("train/task", "train/loop", "train/build", "train/metrics", "optim/stable_adamw")
    steps += ("data/order", "data/open", "formats")
    assert {f"lowprec/{name}.py" for name in steps} < paths
    assert not MEASURING & paths and all((ROOT / path).exists() for path in MEASURING)
    folders = {path.split("/")[1] for path in paths if path.startswith("lowprec/")}
    assert not {"runs", "sweep"} & folders
    assert not any(path.startswith("experiments") for path in paths)


def test_changes_list_each_leaf_once():
    before = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    assert changes(before, {"a": {"b": 2, "c": [1, 2]}, "e": 0}) == [
        "a.b: 1 -> 2", "d: None -> absent", "e: absent -> 0",
    ]  # fmt: skip
    assert changes(before, before) == []
