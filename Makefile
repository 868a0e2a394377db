# Each target is one line that calls tools/ or a standard program. `make` alone lists them.
PYTHON ?= python3
PY = .venv/bin/python
CHAPTERS ?=
PORT ?= 8000

.PHONY: help book test check serve execute weave data bench gpu
help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
book: .venv/book ## the site, in _build/html; sets up what it needs
	@$(PY) -m tools.build
test: .venv/test ## every check; sets up what it needs
	@$(PY) -m pytest tests
check: .venv/test ## the same without running the chapters, for while you work
	@$(PY) -m pytest tests -m "not chapters"
serve: book      ## the site on http://localhost:8000 (PORT=8001 for another)
	@$(PY) -m http.server --bind localhost --directory _build/html $(PORT)
execute: .venv/test ## run chapters and store their outputs (CHAPTERS="02 03" for some)
	@$(PY) -m tools.execute $(CHAPTERS)
weave: .venv/test ## recap cells, figure cells, transformer.py and addresses
	@$(PY) -m tools.weave && $(PY) -m tools.address
data: .venv/test  ## what chapter 14 needs, checked by its sums, into data/multi30k
	@$(PY) -m tools.data
bench: .venv/test ## our layers against PyTorch's, as ratios in one run
	@$(PY) -m tools.bench
gpu: .venv/test   ## on a machine with a CUDA device: speed of base, chapters 13 and 14, as JSON
	@$(PY) -m tools.gpu

.venv/book: requirements-book.txt constraints.txt tools/environment.sh
	@PYTHON="$(PYTHON)" sh tools/environment.sh requirements-book.txt && touch $@
.venv/test: requirements.txt requirements-book.txt constraints.txt tests/colab.txt tools/environment.sh
	@PYTHON="$(PYTHON)" sh tools/environment.sh requirements.txt && $(PY) -m pip install --quiet --no-deps --upgrade --target .venv/colab -r tests/colab.txt && touch $@
