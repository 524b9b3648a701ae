"""The command of the benchmarks; tests/test_imports.py says that it loads no torch."""

import os
import sys

import pytest

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import configs
from experiments.benchmarks.peers import LINEAR_PEERS


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["layer", "dim=[16]"], "dim: no such key; nearest: dims (the root has dims,"),
        (["step", "model.widht=1"], "model.widht: no such key"),
        (["lyer"], "nearest: layer"),
        (["layer", "dims=[16],[32]"], "python -m experiments.benchmarks layer -m 'dims=[16],[32]'"),
    ],
)
def test_wrong_names_and_keys_are_refused(words, fault, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    monkeypatch.setattr(command, "importlib", None)  # no benchmark is imported
    with pytest.raises(SystemExit) as refused:
        command.main()
    assert fault in f"{refused.value} {capsys.readouterr().err}"


def test_help_ends_in_silence_when_nobody_reads_it(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        command.main()
        stream.flush()


def test_the_peers_of_a_layer_are_those_of_its_keys():
    assert set(configs.PEERS) == set(LINEAR_PEERS)
