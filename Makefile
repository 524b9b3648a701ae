# make demo | make test: all set-up in .venv, then the job. Nothing is installed twice.
# make demo PYTHON=python3 VENV= : use that interpreter as it is and install nothing.
PYTHON ?= python3
VENV ?= .venv
DEMO = experiment=loss_curves_demo

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

.PHONY: demo test test-slow test-gpu test-system ways mutants wheel lint clean

demo: $(READY)
	@$(PY) -m experiments.train -m $(DEMO)
	@$(PY) -m analysis.make loss_curves --scale demo --runs runs/loss_curves --out figures
	@echo "Runs: runs/loss_curves   Figure: figures/loss_curves_demo.png   Next: README.md"

# Three processes on two cores: tests also wait.
test: $(READY)
	@$(PY) -m pytest -q -n 3 --dist worksteal

test-slow: $(READY)
	@$(PY) -m pytest -q -m slow

test-gpu: $(READY)
	@$(PY) -m pytest -q -m gpu

test-system: $(READY)
	@$(PY) -m pytest -q -m system

ways: $(READY)
	@$(PY) tests/ways.py

mutants: $(READY)
	@$(PY) tests/mutants.py

# Builds the wheel and uses it in an empty environment: make wheel PYTHON=python3.13 TORCH=2.12.*
TORCH ?= *
WHEEL = $(or $(VENV),.venv)/wheel
wheel:
	@rm -rf $(WHEEL) && $(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/python -m pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	@$(WHEEL)/bin/python -m pip install --quiet $(WHEEL)/lowprec-*.whl "torch==$(TORCH)"
	@$(WHEEL)/bin/python -I tests/smoke.py

lint: $(READY)
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -c "from importlinter.cli import lint_imports_command as lint; lint()"

# pip installs once for each state of the two files; bytecode is compiled on the way.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lowprec needs Python >= 3.11 ($(PYTHON) is older): make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  echo "note: no C++ compiler, which compile=true and GPU kernels need: apt-get install g++"
	@command -v curl >/dev/null || \
	  echo "note: no curl, which data=stream needs for URLs: apt-get install curl"
	@echo "Installing into $(VENV) (about a minute)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[harness,dev,loggers]'
	@$(VENV)/bin/python -c 'import open_clip' 2>/dev/null || \
	  echo "note: torchvision does not fit this build of torch: experiments/TROUBLESHOOTING.md"
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
