"""Trains the configs of a JSON file under torchrun, each with its word: `captured` or `eager`."""

import json
import sys
from pathlib import Path

from lowprec.config.check import check
from lowprec.train import step

can_capture, call, replays = step.can_capture, step.GraphedStep.__call__, []
step.can_capture = lambda *words: word == "captured" and can_capture(*words)  # others import it
step.GraphedStep.__call__ = lambda self, batch: replays.append(self) or call(self, batch)

from experiments import train as entry  # noqa: E402

for word, raw in json.loads(Path(sys.argv[1]).read_text()):
    replays.clear()
    entry.main(check(raw))
    assert bool(replays) == (word == "captured")
