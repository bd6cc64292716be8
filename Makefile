# Swin Lessons. `make help` lists the targets; the two that matter are `make book` and `make test`.
PYTHON ?= python3
# Where pip looks for PyTorch beside PyPI. Linux without a GPU: TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# Parallel test processes, each with one thread.
WORKERS ?= 2

BIN = .venv/bin
ONE_THREAD = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONHASHSEED=0 TQDM_DISABLE=1 \
	SWIN_LESSONS_PROFILE=$${SWIN_LESSONS_PROFILE:-ci}
NBVAL = --nbval --nbval-current-env --nbval-sanitize-with tests/nbval.cfg --nbval-cell-timeout 300 \
	--nbval-kernel-startup-timeout 120

.PHONY: help book pdf test lab bench data notebooks lesson run student check clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

book: .venv/installed ## install what is needed into .venv and build the site into _build/html
	@$(BIN)/python book/_ext/build_site.py

pdf: .venv/installed ## print the whole book to _build/swin-lessons.pdf; needs Chromium or Chrome
	@$(BIN)/python book/_ext/print_book.py

test: .venv/installed ## check style, types and spelling, build the site, run all tests and notebooks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	@$(BIN)/swin-lessons data fashion-mnist || echo "No Fashion-MNIST: the lessons that need it are skipped."
	$(BIN)/python book/_ext/build_site.py
	$(ONE_THREAD) $(BIN)/pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(NBVAL) notebooks tests

lab: .venv/installed ## open the lessons in JupyterLab
	$(BIN)/jupyter lab notebooks

bench: .venv/installed ## measure the models against timm, torchvision and transformers on this machine
	$(BIN)/swin-lessons bench --against timm,torchvision,transformers

data: .venv/installed ## find or fetch Fashion-MNIST (30 MB) and check it
	$(BIN)/swin-lessons data fashion-mnist

notebooks: .venv/installed ## run again, in place, the lessons whose code has changed
	$(BIN)/python book/_ext/notebooks.py run --stale

lesson: .venv/installed ## start a lesson: make lesson N=7 TITLE="Towards 3 B"
	$(BIN)/python book/_ext/new_lesson.py "$(N)" "$(TITLE)"

run: .venv/installed ## run one lesson in place and stamp it: make run N=7
	$(BIN)/python book/_ext/notebooks.py run notebooks/$(shell printf '%02d' $(N))_*.ipynb

student: .venv/installed ## copies of the lessons without solutions, into _build/student
	$(BIN)/python book/_ext/student.py

check: .venv/installed ## the quick loop: style, types, spelling, stamps and what the lessons are made of
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(ONE_THREAD) $(BIN)/pytest -q -n $(WORKERS) tests/test_notebooks.py tests/test_repository.py tests/test_lesson_tools.py \
		tests/test_plots.py tests/test_explorers.py tests/models/test_windows.py

clean: ## delete the site, the fetched scripts and the caches; .venv and data stay
	rm -rf _build book/_assets/vendor .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# One line of check for each thing that a bare machine may lack, with its remedy.
.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || \
		{ echo "No $(PYTHON) here. Install Python 3.11 to 3.13, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "$(PYTHON) is `$(PYTHON) --version`; the book needs 3.11 to 3.13. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
		{ echo "$(PYTHON) has no venv module. On Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-c constraints.txt -e '.[all]'
	@touch $@
