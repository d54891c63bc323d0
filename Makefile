# Two commands matter: `make serve` and `make test`. Each sets up all that it needs, once.
# ARGS go to the command: make serve ARGS="--openai-port 9100", make test ARGS="-k sampler".

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=
TYPESCRIPT := client/typescript

.PHONY: serve test unit ecosystem lint typecheck wheel-check setup clean

serve: $(VENV)/.installed
	$(BIN)/shoal serve $(ARGS)

# torch's idle threads would otherwise spin on the cores that the server under test needs.
TEST_ENV := PYTHONSAFEPATH=1 OMP_WAIT_POLICY=PASSIVE

test: setup
	$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

unit: $(VENV)/.installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest tests/unit $(ARGS)

# Other people's clients against the real server, in environments of their own in build/ecosystem.
ecosystem: setup
	$(TEST_ENV) PYTHONPATH=tests:tests/ecosystem $(BIN)/python tests/ecosystem/run.py $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy cannot follow the editable install's import hook, so it is shown the same packages by links.
typecheck: $(VENV)/.installed-dev
	@mkdir -p build/typecheck/shoal
	@for folder in scheduler kernels backend client load; do \
	  ln -sfn ../../../$$folder build/typecheck/shoal/$$folder; done
	cd build/typecheck && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p shoal.scheduler -p shoal.load

wheel-check: $(VENV)/.installed-dev
	PYTHONSAFEPATH=1 $(BIN)/python .ci/check_wheel.py

setup: $(VENV)/.installed-dev $(TYPESCRIPT)/node_modules/.installed
	$(BIN)/shoal pull

# The TypeScript SDK's test tools, where there is npm; without, its tests are skipped and say so.
$(TYPESCRIPT)/node_modules/.installed: $(TYPESCRIPT)/package-lock.json
	@if command -v npm > /dev/null; then \
	  echo "Installing the test tools of the TypeScript SDK ..."; \
	  (cd $(TYPESCRIPT) && npm ci --silent --ignore-scripts) && touch $@ || \
	    echo "npm ci failed in $(TYPESCRIPT): the TypeScript SDK's tests will be skipped."; \
	else echo "There is no npm: the TypeScript SDK's tests will be skipped."; fi

clean:
	rm -rf $(TYPESCRIPT)/node_modules $(TYPESCRIPT)/dist $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || { \
	  echo "Shoal needs Python 3.11 or 3.12; $(PYTHON) is `$(PYTHON) --version 2>&1`." \
	       "Name another: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "No virtual environment could be made; on Debian: apt-get install python3-venv"; \
	  rm -rf $(VENV); exit 1; }

# Versions are pinned in constraints.txt, so that two machines get the same server.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Shoal into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Shoal and its test tools into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed
