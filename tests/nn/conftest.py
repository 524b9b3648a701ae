"""The oracle for layers and a fast torch.compile, as fixtures."""

import importlib.util
from pathlib import Path

import pytest
import torch

SPEC = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))


@pytest.fixture(scope="session")
def oracle():
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module


@pytest.fixture
def graphs(monkeypatch):
    """torch.compile records graphs, but runs them as they are, which takes far less time."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **options: compile(*args, **options | {"backend": "eager"})
    )
