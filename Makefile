PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lab check docs plots format ruler clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP)  ## generate text six ways with the same bits, one of them guessed ahead, then the lab's quick matrix with a page to open
	@mkdir -p build
	$(BIN)/python examples/same_bits.py
	$(BIN)/lockstep lab run --quick --html build/lab.html

test: $(STAMP)  ## all tests, two workers, the slowest ten listed
	$(BIN)/python -m pytest -n 2 --durations=10

lab: $(STAMP)  ## every cell, is docs/matrix.md what was found, every revert; a page in build/lab.html
	@mkdir -p build
	$(BIN)/lockstep lab run --json build/lab.json
	$(BIN)/lockstep lab matrix --check --from build/lab.json
	$(BIN)/lockstep lab reverts --from build/lab.json --json build/reverts.json --html build/lab.html

check: $(STAMP)  ## ruff, ruff format and mypy --strict; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict lockstep

docs:  ## the API pages, docs/api/, from the source
	$(PYTHON) tools/api.py

plots: $(STAMP)  ## the pictures of docs/ that show GPU and speculation results, from bench/results/
	$(BIN)/python tools/plots.py

format: $(STAMP)  ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

ruler:  ## lines per folder and share; fails above the limits; BASE=main prints the change since then
	@$(PYTHON) tools/ruler.py $(if $(BASE),--base $(BASE))

clean:  ## remove everything that make made, the environment included
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lockstep tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# The exact pins decide what is downloaded: never install without the constraints.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@
