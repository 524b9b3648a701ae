"""Trains the configs of a JSON file under torchrun; with the word `eager`, captures no step."""

import json
import sys
from pathlib import Path

from lowprec.config.check import check
from lowprec.train import step

if sys.argv[2] == "eager":
    step.can_capture = lambda config, device: False  # before others import it

from experiments import train as entry

plain, replays = step.GraphedStep.__call__, []
step.GraphedStep.__call__ = lambda self, batch: replays.append(self) or plain(self, batch)

for raw in json.loads(Path(sys.argv[1]).read_text()):
    entry.main(check(raw))
assert bool(replays) == (sys.argv[2] != "eager")
