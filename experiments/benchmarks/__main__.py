"""Runs a benchmark by its name: layer, model, ops, optimizer, scale or step.

    python -m experiments.benchmarks layer dims=[1280]

`python -m experiments.benchmarks NAME --help` lists the keys of one.
"""

import importlib
import sys

from experiments.benchmarks.configs import BENCHMARKS
from experiments.entry import parse_command, refuse, run_command, unbroken_output
from lowprec.config.check import ConfigError
from lowprec.nearest import nearest


def main() -> None:
    """Checks the command line, without torch; then imports and runs the benchmark that it names."""
    name, *words = sys.argv[1:] or [""]
    if name in ("-h", "--help"):
        with unbroken_output():
            print(__doc__.strip())
        return
    if name not in BENCHMARKS:
        hint = nearest(name, BENCHMARKS)
        refuse(ConfigError([f"benchmark {name!r}: name one of {', '.join(BENCHMARKS)}{hint}"]))
    schema = BENCHMARKS[name]

    def run(config: object) -> None:
        importlib.import_module(f"experiments.benchmarks.{name}").main(config)

    run_command(run, f"benchmarks {name}", schema, arguments=parse_command(words))


if __name__ == "__main__":
    main()
