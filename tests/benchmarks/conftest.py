"""`lines_of`: what a benchmark writes."""

import json

import pytest


@pytest.fixture
def lines_of(tmp_path, capsys):
    """`lines_of(main, config)`: the lines of one measurement; also `lines_of.lines` if it exits."""

    def run(main, config):
        config.run_dir = str(tmp_path)
        try:
            main(config)
        finally:
            run.lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return run.lines

    return run
