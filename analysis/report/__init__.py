"""A folder of runs as one page: `python -m analysis.report --runs DIR --out FILE.html`."""
