# Everything a newcomer or a CI machine runs. Needs python3 (3.11 or newer); a C++ compiler makes it fast.
#
#   make install   .venv with all that serving needs (the native kernels are built where a compiler is found)
#   make serve     serve the default model on 127.0.0.1:8000          ARGS="--port 9000 --threads 4" passes more
#   make test      run the tests, a sample of the costly ones           ARGS="-k engine" passes more
#   make test-all  run all of every test
#   make clients   .venv-clients with the clients that others made (openai, litellm, ...), which the tests then try
#   make lm-eval   .venv-lm-eval with lm-evaluation-harness (760 MB), which tests/clients/test_lm_eval.py then tries
#   make fuzz      10,000 calls made by schemathesis from /openapi.json    ARGS="--examples 50" makes more
#   make check     formatting, lint, types, house rules
#   make stress    200 mixed concurrent requests, three rounds         ARGS="--requests 24 --max-tokens 512"
#   make site      the documentation as a site, in build/site
#   make wheels    dist/tokenmill-*.whl for Linux, x86-64 and ARM, tried in a fresh environment without a compiler
#   make release   dist/ with these, the sources, a list of what they need (SBOM) and checksums
#   make oracle    regenerate the llama.cpp goldens (own environment)
#   make clean     remove what the above made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := CMakeLists.txt src/tokenmill/core/sampling.py $(shell find native -type f 2>/dev/null)
ARGS ?=

# `make` runs these one after another in one environment: parallel jobs would race on it.
.NOTPARALLEL:
.PHONY: install serve test test-all packages environments clients lm-eval fuzz check stress wheels release oracle site clean

install: $(VENV)/installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "tokenmill needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Prints what pyproject.toml says that a part of it needs, a line each.
required = $(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1), sep="\n")'

# An editable install: changes under src/ are live. The native library is built again when its sources change, in a folder that is
# kept (build/kernels), so that only what changed is compiled: pip's isolated environment, which is another one each time, would begin
# anew. Verbose, so that the compiler's progress is seen; dependencies apart, since pip would tell of every file that it looks at.
$(VENV)/installed: pyproject.toml src/tokenmill/__init__.py $(NATIVE) | $(BIN)/python
	@echo "installing tokenmill; with a C++ compiler the kernels are built, which takes minutes on a small machine"
	$(call required,["project"]["dependencies"]) > $(VENV)/dependencies.txt
	$(call required,["build-system"]["requires"]) >> $(VENV)/dependencies.txt
	$(PIP) install --requirement $(VENV)/dependencies.txt cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip --disable-pip-version-check install --verbose --no-deps \
	  --no-build-isolation --config-settings=build-dir=build/kernels --editable .
	@$(BIN)/tokenmill doctor --brief
	@touch $@

# Only the packages of an extra: installing '.[extra]' would build the native library again. Few of their modules are ever
# imported, so none is compiled beforehand.
$(VENV)/extra-%: pyproject.toml | $(VENV)/installed
	$(call required,["project"]["optional-dependencies"]["$*"]) > $@.txt
	$(PIP) install --no-compile --requirement $@.txt
	@touch $@

serve: install
	$(BIN)/tokenmill serve $(ARGS)

# Four files at a time, also on two cores: tests of servers, which come first, mostly wait. `make test` runs the sample of
# this commit of the tests that are marked `sampled` (tests/sampling.py). A process that crashes ends the run: one in its
# place may never be told that the tests are over.
test: SAMPLE := --sample commit
test test-all: install $(VENV)/extra-test environments
ifeq ($(strip $(ARGS)),)
	$(BIN)/python -m pytest $(SAMPLE) --numprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
else
	$(BIN)/python -m pytest $(ARGS)
endif

# Apart from ours, so that continuous integration can install them while the kernels are built.
environments: clients $(VENV)-fuzz/installed $(VENV)-site/installed

# Clients' packages have an environment of their own, so that their pins never meet ours. Without them tests are skipped.
clients: $(VENV)-clients/installed

$(VENV)-clients/installed: tests/clients/requirements.txt
	@test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	@if $(VENV)-clients/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --requirement $<; \
	  then touch $@; else rm -rf $(VENV)-clients; echo "the clients cannot be installed here; their tests are skipped"; fi

# lm-eval takes 760 MB: only who wants it has it, and tests/clients/test_lm_eval.py is skipped without it.
lm-eval: $(VENV)-lm-eval/installed

$(VENV)-lm-eval/installed: tests/clients/requirements-lm-eval.txt
	test -x $(VENV)-lm-eval/bin/python || $(PYTHON) -m venv $(VENV)-lm-eval
	$(VENV)-lm-eval/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --requirement $<
	touch $@

# schemathesis has an environment of its own too. Without it the test that uses it is skipped.
fuzz: install $(VENV)/extra-test $(VENV)-fuzz/installed
	$(BIN)/python tests/fuzz/fuzz_api.py $(ARGS)

$(VENV)-fuzz/installed: tests/fuzz/requirements.txt
	@test -x $(VENV)-fuzz/bin/python || $(PYTHON) -m venv $(VENV)-fuzz
	@if $(VENV)-fuzz/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --requirement $<; \
	  then touch $@; else rm -rf $(VENV)-fuzz; echo "schemathesis cannot be installed here; its test is skipped"; fi

# mkdocs too. Without it the test that builds the site is skipped.
site: $(VENV)-site/installed
	$(VENV)-site/bin/mkdocs build --strict

$(VENV)-site/installed: scripts/docs_site_requirements.txt
	@test -x $(VENV)-site/bin/python || $(PYTHON) -m venv $(VENV)-site
	@if $(VENV)-site/bin/python -m pip --disable-pip-version-check --quiet install --requirement $<; \
	  then touch $@; else rm -rf $(VENV)-site; echo "mkdocs cannot be installed here; its test is skipped"; fi

# All that checks and tests need in our own environment.
packages: install $(VENV)/extra-dev $(VENV)/extra-test

check: install $(VENV)/extra-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

stress: install $(VENV)/extra-test
	$(BIN)/python tests/live/stress.py $(ARGS)

# Compiled by zig against glibc 2.28 (2018), whatever this machine has; no other compiler is needed. auditwheel tags a wheel
# by the oldest glibc that has all it needs. A wheel of this machine's own system, macOS for one: python3 -m pip wheel --no-deps .
RELEASE := $(VENV)-release/bin
GLIBC := 2.28
WHEELS := x86_64 aarch64
DATED = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct)

wheels: $(VENV)-release/installed
	rm -rf dist
	$(foreach arch,$(WHEELS),$(call wheel,$(arch)) &&) true
	PYTHON=$(PYTHON) .ci/try_wheel dist/*_$$(uname -m).whl

define wheel
rm -rf build/dist && \
$(DATED) PATH="$(CURDIR)/$(RELEASE):$$PATH" ZIG_TARGET=$(1)-linux-gnu.$(GLIBC) _PYTHON_HOST_PLATFORM=linux-$(1) \
  $(RELEASE)/python -m build --wheel --outdir build/dist \
  -C cmake.toolchain-file=$(CURDIR)/native/zig.cmake -C install.strip=false && \
$(DATED) PATH="$(CURDIR)/$(RELEASE):$$PATH" \
  $(RELEASE)/python -m auditwheel repair --only-plat --plat auto --wheel-dir dist build/dist/*.whl
endef

# The bill of materials lists what pip puts beside the wheel today.
release: wheels
	$(DATED) $(RELEASE)/python -m build --sdist --outdir dist
	$(PYTHON) -m venv --clear --without-pip build/shipped
	$(RELEASE)/python -m pip --python build/shipped/bin/python install --quiet dist/*_$$(uname -m).whl
	$(RELEASE)/cyclonedx-py environment build/shipped/bin/python --pyproject pyproject.toml --output-reproducible \
	  --output-file $$(ls dist/*.tar.gz | sed 's/\.tar\.gz$$//').cdx.json
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

$(VENV)-release/installed: scripts/release_requirements.txt
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip --disable-pip-version-check --quiet install --requirement $<
	@touch $@

oracle: install
	test -x $(VENV)-oracle/bin/python || $(PYTHON) -m venv $(VENV)-oracle
	$(VENV)-oracle/bin/python -m pip --disable-pip-version-check --quiet install llama-cpp-python==0.3.36
	$(VENV)-oracle/bin/python tests/oracle/make_llama_goldens.py "$$($(BIN)/tokenmill pull smollm2 --quiet)" $(ARGS)
	PYTHONPATH=src $(VENV)-oracle/bin/python tests/oracle/make_tokenizer_goldens.py \
	  "$$($(BIN)/tokenmill pull smollm2 --quiet)" $(ARGS)

clean:
	rm -rf $(VENV) $(VENV)-oracle $(VENV)-clients $(VENV)-lm-eval $(VENV)-fuzz $(VENV)-site $(VENV)-release build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
