"""`lines_of`: what a benchmark writes."""

import pytest

from lowprec.runs.read import read_rows


def by_case(lines):
    return {line["case"]: line for line in lines}


@pytest.fixture
def lines_of(tmp_path):
    """`lines_of(main, config)`: the lines of one measurement; also `lines_of.lines` if it exits."""

    def run(main, config):
        config.run_dir = str(tmp_path)
        try:
            main(config)
        finally:
            files = sorted((tmp_path / "bench").glob("*/*.jsonl"))
            run.lines = [row for file in files for row in read_rows(file)]
        return run.lines

    return run
