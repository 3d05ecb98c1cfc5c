# Two commands: `make bench` (install, run, print both tables) and `make test`. Both are safe to run again.
# Needs Python >= 3.11 with venv, make, and the package index; no root and nothing else from the network.

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV_VERSION := 0.13.8
RUN := $(BIN)/python -m mmkv_bench

# The first interpreter that is new enough; PYTHON=/path/to/python chooses another one.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$p && break; done)

# A mirror set up for pip serves uv as well.
ifneq ($(PIP_INDEX_URL),)
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help bench test test-quick test-slow test-full test-dispatch fuzz fuzz-identity fuzz-store soak lint docs results results-real results-real-sinks results-real-efficiency results-continuation results-questions results-streams results-questions-real results-reader results-reader-entries first-real verify matrix bench-statistics compare-real bench-fork bench-real bench-decode bench-stream bench-questions bench-tables bench-store bench-methods bench-start bench-gpu simulate simulate-levels papers site notebooks size check-platforms check-export lock

help:
	@echo "make bench             install if needed, run mmshift at 64 entries and experiment=demo on the embedded model"
	@echo "                       (LIMIT=4 runs the first samples only)"
	@echo "make test              install if needed, lint, run the tests (PYTEST='-k name' selects)"
	@echo "make test-quick        the inner loop, a minute: architecture, what compresses, statistics, judging (PYTEST='-k name' selects)"
	@echo "make test-slow         the tests of about a second or more each, which make test leaves out; CI runs both"
	@echo "make test-full         all tests, those marked slow and full as well; before a release"
	@echo "make test-dispatch     the numerical tests with the kernels of two older processors; long"
	@echo "make fuzz              300 drawn configurations, right and wrong, through the command line (FUZZ='--seed 5 --runs 50')"
	@echo "make soak              200 random kill -9 of a sweep while readers poll, rows compared: an hour (SOAK='--seed 1 --kills 50')"
	@echo "make fuzz-store        flip 400 single bits in copies of stores in git: 0 may change a value silently; a minute"
	@echo "make fuzz-identity     change one input file of a run at a time, before it and during it, 300 times, then 500 single bytes, fields and names: 0 may be silent; a quarter of an hour"
	@echo "make lint              ruff check, ruff format --check, mypy, and no file or results too large for git"
	@echo "make results           make or continue results/tiny: every method, released readings, ablations; hours"
	@echo "make results-continuation  make or continue results/continuation: documentation continued, KL to full; hours"
	@echo "make results-questions make or continue results/questions: four questions per cache, embedded model; an hour"
	@echo "make results-reader    make or continue results/reader: twelve methods on pages, the fetched reader; hours (-entries: single entries)"
	@echo "make results-streams   make or continue results/streams: facts by age in streams with a hard cap, embedded model; half an hour"
	@echo "make results-questions-real  the same on pretrained weights; hours"
	@echo "make results-real      make or continue results/real: pretrained weights, English documents; hours"
	@echo "make results-real-sinks  make or continue results/real_sinks: what the first entries are worth; an hour"
	@echo "make results-real-efficiency  make or continue results/real_efficiency: times and bytes at three lengths; an hour on a quiet machine"
	@echo "make first-real        two pretrained VLMs x 2 datasets x 6 methods x 3 budgets on one GPU of 24 GB, into a bundle to send"
	@echo "                       (MODELS=, FIRST_REAL='limit=50 ...' change the experiment; docs/first_real.md)"
	@echo "make matrix            every model family x dataset with a fixture x method once, random weights; hours"
	@echo "make bench-statistics  time and peak memory of the streaming attention statistics"
	@echo "make bench-fork        cost of 21 cells with one shared prefill"
	@echo "make compare-real      the weights of four bits against the published ones, where the hub answers; hours"
	@echo "make bench-real        the same on pretrained weights, English documents of 730 tokens"
	@echo "make bench-decode      how near a decode step is to the memory's bandwidth, beside stock transformers"
	@echo "make bench-stream      time and memory of a chunk of a stream of 100,000 tokens, at its end beside its beginning"
	@echo "make bench-questions   what four questions about a document cost beside one: prepared once, and the whole"
	@echo "make bench-tables      time and memory of tables and scoring: committed rows, 100 methods, 10,000 cells"
	@echo "make bench-store       time and memory of resuming, status, scoring, tables, packing of 1 and 4 million answers (SCALE=.1)"
	@echo "make bench-methods     time and extra memory of every method on one layer, beside its attention"
	@echo "make bench-gpu         on an NVIDIA GPU: measurements beside their goals into results/gpu/, in pieces that it continues"
	@echo "make bench-start       what commands import before they work, beside what they cannot do without"
	@echo "make simulate          how often bold, ranks and separated pairs are wrong, in 1,000 made-up columns of each kind"
	@echo "make verify            make 50 answers drawn from all committed rows again and compare; minutes (SAMPLES=, SEED=)"
	@echo "make docs              write the pages of methods, data sets and models in docs/ from the files in conf/, and the README's links to cells"
	@echo "make simulate-levels   how often equal methods are separated, in 360 kinds of families, into results/bench/levels.md"
	@echo "make papers            every table of the papers, measured beside printed, into runs/papers_pages, docs/reproducibility.md, and the"
	@echo "                       stand-ins of their layouts (results/tiny/papers)"
	@echo "make site              docs, README and the API from docstrings as pages in site/, built offline"
	@echo "make notebooks         run the notebooks and write their outputs into them: minutes"
	@echo "make size              lines of code per room, words of README and docs, files that the first command and DictConfig pass through"
	@echo "make check-export      are exported records (RECORDS=<folder>, or those of results/tiny/large) valid Every Eval Ever ones"
	@echo "make check-platforms   does the lock install on Linux, macOS and Windows, Python 3.11 to 3.14; downloads nothing"
	@echo "make lock              resolve requirements.lock anew from pyproject.toml"

# Both runs at once, one process each (a model this small computes on one thread): the second's output follows the first's.
bench: $(STAMP)
	@demo=$$(mktemp); trap 'rm -f $$demo' EXIT; \
	$(RUN) experiment=demo $(if $(LIMIT),limit=$(LIMIT)) >$$demo 2>&1 & second=$$!; trap 'kill $$second' INT TERM; \
	echo '$(RUN) method=mmshift budget=64'; \
	$(RUN) method=mmshift budget=64 $(if $(LIMIT),limit=$(LIMIT)); first=$$?; \
	echo '$(RUN) experiment=demo'; wait $$second; second=$$?; cat $$demo; exit $$((first > second ? first : second))

# Idle workers take tests from busy ones, so no worker ends long after the other. Bytecode is kept even where the
# shell says that none is to be written: every process that a test starts would compile all that it imports anew.
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
# Lint and types beside them: workers wait for imports at first.
WITH_LINT = $(MAKE) --no-print-directory lint & lint=$$!; $(1); tests=$$?; \
	wait $$lint || { echo "make lint failed: what it says stands above"; exit 1; }; exit $$tests
test: $(STAMP)
	@$(call WITH_LINT,$(TESTS) $(PYTEST))

QUICK := tests/test_architecture.py $(addprefix tests/,compression statistics judging) \
	$(addprefix --ignore=tests/,compression/test_fused.py compression/test_more_methods.py)
test-quick: $(STAMP)
	$(TESTS) $(QUICK) $(PYTEST)

test-slow: $(STAMP)
	$(TESTS) -m "slow and not full" $(PYTEST)

test-full: $(STAMP)
	@$(call WITH_LINT,$(TESTS) -m "" $(PYTEST))

# The numerical tests as on two older processors; the kernels that libraries choose there round differently.
NUMERICAL := $(addprefix tests/,core compression methods generation calibrate tiny statistics tables run models)
OLDEST := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41 OPENBLAS_CORETYPE=Nehalem
OLDER := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OPENBLAS_CORETYPE=Haswell
test-dispatch: $(STAMP)
	OMP_NUM_THREADS=1 $(OLDEST) $(BIN)/python -m pytest -n 2 -m "not full" $(NUMERICAL) $(PYTEST)
	OMP_NUM_THREADS=1 $(OLDER) $(BIN)/python -m pytest -n 2 -m "not full" $(NUMERICAL) $(PYTEST)

# Every right one gives all its rows, every wrong one a sentence; minutes. A case alone: FUZZ='--seed 0 --only 17'.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(FUZZ)

# An hour: SIGKILL at 200 random moments of a sweep, with readers; other moments: SOAK='--seed 1 --kills 50'. With bytecode,
# as the tests; after SOAK='--minutes 20', Ctrl-C or TERM it writes what it has met.
soak: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --write results/bench/soak.md $(SOAK)

# A case alone fails with its number: the same SEED and CASES reach it again.
fuzz-identity: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.identity --seed $(or $(SEED),0) --cases $(or $(CASES),300) --changes $(or $(CHANGES),500)

fuzz-store: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.store.bit_flips --flips 400 results/tiny/large results/tiny/ablations

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/weight.py
	$(BIN)/mypy

# Every row and table below results/tiny/{methods,readings,ablations,mmshift_ablations}; continues where it was
# interrupted, hours on two cores. `make results RESULTS=runs/full PACK=` makes the full rows beside the slim ones in git.
RESULTS ?= results/tiny
PACK ?= --slim
results: $(STAMP)
	for size in small large; do for name in methods readings; do \
		$(BIN)/python -m mmkv_bench launch --processes 2 experiment=$$name page_size=$$size fork_batch=64 \
			out=$(RESULTS)/$$name || exit 1; \
	done; done
	for name in ablations mmshift_ablations; do \
		$(BIN)/python -m mmkv_bench launch --processes 2 experiment=$$name fork_batch=64 out=$(RESULTS)/$$name || exit 1; \
	done
	for name in methods readings ablations mmshift_ablations; do \
		$(BIN)/python -m mmkv_bench tables $(RESULTS)/$$name > $(RESULTS)/$$name/tables.md || exit 1; \
		$(BIN)/python -m mmkv_bench pack $(PACK) $(RESULTS)/$$name || exit 1; \
	done

# The comparison on a pretrained language model; hours on two cores, continues where it was interrupted.
# limit: of the rows in git; experiment=reader itself asks 200 documents. A higher limit continues them.
READER = $(BIN)/python -m mmkv_bench launch --processes 2 experiment=reader
results-reader: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model reader
	$(READER) dataset=reader_value limit=200
	$(READER) dataset=reader_row limit=60
	$(READER) dataset=reader_second limit=40
	$(READER) model=reader_video dataset=reader_change limit=40
	$(READER) dataset=reader_value limit=60 protocol=query_agnostic budget=20%
	$(READER) dataset='[reader_row,reader_second]' limit=40 protocol=query_agnostic budget=20%
	$(READER) model=reader_video dataset=reader_change limit=40 protocol=query_agnostic budget=20%
	for data in "reader_value limit=60" "reader_row limit=60" "reader_second limit=40" "reader_change limit=40 model=reader_video"; do \
		$(READER) protocol=strict budget=20% dataset=$$data \
			method='[full,oracle,random,snapkv,adakv,keydiff,last_query,mmshift,flashcache]' || exit 1; \
	done
	$(BIN)/python -m mmkv_bench diagnose sinks model=reader dataset=reader_value --samples 8 out=results/reader
	$(BIN)/python -m mmkv_bench diagnose vision model=reader dataset=reader_value --samples 8 out=results/reader
	$(BIN)/python -m mmkv_bench diagnose vision model=reader_video dataset=reader_change --samples 8 out=results/reader
	$(BIN)/python -m mmkv_bench diagnose vision dataset=pages_lookup --samples 8 out=results/reader
	$(BIN)/python -m mmkv_bench tables results/reader > results/reader/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/reader

# What single entries of a page are worth; sinks at equal entries; merging beside dropping.
results-reader-entries: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model reader
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=reader_entries limit=60
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=sinks model=reader dataset=reader_value budget=20% fidelity=off limit=40 \
		out=results/reader_entries
	$(BIN)/python -m mmkv_bench launch --processes 2 model=reader dataset=reader_value budget=20% 'method=[full,look_m]' \
		'variants.look_m_drop={base: look_m, merge: none}' fidelity=off limit=40 out=results/reader_entries
	$(BIN)/python -m mmkv_bench tables results/reader_entries > results/reader_entries/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/reader_entries

results-real: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real dataset='[english_needles,english_records]'
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real dataset=english_passages limit=100
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real method=full \
		dataset='[english_needles_question,english_records_question,english_passages_question]'
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real model=smollm2_135m_q4_1 method=full limit=40
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real protocol=strict dataset=english_records budget='[10%,20%,40%]' \
		method='[full,oracle,random,adakv,snapkv,keydiff,last_query,mmshift,h2o]'
	for data in "english_needles limit=60" "english_passages limit=40"; do \
		$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real protocol=strict dataset=$$data budget='[10%,20%,40%]' \
			method='[full,oracle,random,adakv,snapkv,keydiff,last_query,mmshift,h2o]' || exit 1; \
	done
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real dataset=english_records_4k budget='[5%,10%,20%]' limit=40
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real protocol=query_agnostic dataset=english_records budget=10% \
		method='[full,random,adakv,snapkv,keydiff,mmshift,h2o]'
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real protocol=query_aware dataset=english_records budget=10% \
		method='[full,random,adakv,snapkv,keydiff,mmshift,h2o]'
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real protocol=masked dataset=english_records budget=10% limit=40 \
		method='[full,random,adakv,snapkv,keydiff,mmshift,h2o]'
	$(BIN)/python -m tools.requantise fetched://smollm2_135m_q4_1/SmolLM2-135M-Instruct.Q4_1.gguf runs/models/smollm2_135m_offset16
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real model.name=smollm2_135m_q4_1_offset16_english \
		model.path=runs/models/smollm2_135m_offset16 dataset=english_records budget=10% limit=100
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real model.dtype=bfloat16 dataset=english_records budget=10% limit=100
	for data in "model=smollm2_135m_q4_1 dataset=english_passages" "dataset=pages_lookup"; do \
		$(BIN)/python -m mmkv_bench diagnose sinks $$data --samples 8 out=results/real || exit 1; \
	done
	$(BIN)/python -m mmkv_bench tables results/real > results/real/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/real

# What first entries are worth, on pretrained weights and on the embedded model.
results-real-sinks: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=sinks
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=sinks model=tiny dataset=pages_lookup budget=64
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=first_entries
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=first_entries model=tiny dataset=pages_lookup
	$(BIN)/python -m mmkv_bench tables results/real_sinks > results/real_sinks/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/real_sinks

# Times and bytes of the same weights. Its rows keep their times, so that they are not slim.
results-real-efficiency: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -m mmkv_bench experiment=real_efficiency
	$(BIN)/python -m mmkv_bench tables results/real_efficiency --metric tpot_s,ttft_s,peak,bytes > results/real_efficiency/tables.md
	$(BIN)/python -m mmkv_bench pack results/real_efficiency

# The published weights on documents of results/real, with the same adapter; stops with a sentence where the hub does not answer.
compare-real: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m
	$(BIN)/python -m mmkv_bench launch --processes 2 experiment=real model=smollm2_135m model.dtype=float32 \
		model.adapter=pkg://mmkv_bench/datasets/tasks/english/adapter 'dataset=[english_needles,english_records]' \
		'method=[full,snapkv,h2o,keydiff,mmshift]' 'budget=[10%,20%]' out=runs/compare_real
	$(BIN)/python -m tools.compare_rows results/real smollm2_135m_q4_1_english runs/compare_real smollm2_135m

# An evening on one GPU of 24 GB: run again, it continues. Failed answers are rows (exit code 1); the last line says what is
# lacking. FIRST_REAL: settings of the experiment, as for `mmkv-bench run`.
MODELS ?= smolvlm_256m,qwen2_5_vl_3b
FIRST_ROWS ?= runs/first_real
FIRST_SETTINGS = experiment=first_real model=$(MODELS) $(FIRST_REAL)
first-real: $(STAMP)
	$(RUN) sweep $(FIRST_SETTINGS) out=$(FIRST_ROWS) || test $$? -eq 1
	$(RUN) verify $(FIRST_ROWS) --samples 20 --receipt $(FIRST_ROWS)/receipt.json || test $$? -le 2
	rm -rf $(FIRST_ROWS)_bundle
	$(RUN) pack $(FIRST_ROWS) --publish $(FIRST_ROWS)_bundle --receipt $(FIRST_ROWS)/receipt.json
	$(RUN) accept $(FIRST_ROWS)_bundle $(FIRST_SETTINGS) --samples 0
	$(RUN) sweep experiment=first_pages $(FIRST_REAL) || test $$? -eq 1
	$(BIN)/python scripts/instrument.py score results/reader/predictions.json runs/first_pages
	@echo "the bundle to send: $(FIRST_ROWS)_bundle"

# Documentation continued on the compressed cache; at budget=2 the prompt is its first and last token: perplexity without context.
results-continuation: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -m mmkv_bench experiment=continuation 'method=[full,cut_prompt]' budget=2
	$(BIN)/python -m mmkv_bench experiment=continuation
	for metric in fidelity ppl fidelity_kl,fidelity_top1; do \
		$(BIN)/python -m mmkv_bench tables results/continuation --metric $$metric; \
	done > results/continuation/tables.md
	$(BIN)/python -m mmkv_bench plot position results/continuation --budgets fraction --out docs/images/continuation
	$(BIN)/python -m mmkv_bench pack $(PACK) results/continuation

# Conversations take methods that cut a cache back after each answer; a run refuses the others with the reason.
TALKING = full,random,streamingllm,snapkv,keydiff,expected_attention,h2o,mmshift,last_query
results-questions: $(STAMP)
	$(BIN)/python -m mmkv_bench experiment=questions_pages
	$(BIN)/python -m mmkv_bench experiment=questions_pages protocol=turns 'method=[$(TALKING)]'
	$(BIN)/python -m mmkv_bench tables results/questions --questions > results/questions/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/questions

results-streams: $(STAMP)
	$(BIN)/python -m mmkv_bench experiment=streams
	$(BIN)/python -m mmkv_bench experiment=streams dataset=stream_facts_long stream.positions=compact \
		'method=[full,random,reservoir,streamingllm,even_frames,infinipot_v,generic_query,keydiff,snapkv,mmshift]'
	$(BIN)/python -m mmkv_bench experiment=streams method=streamingllm budget=66
	$(BIN)/python -m mmkv_bench tables results/streams > results/streams/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/streams

# The same on pretrained weights, hours on two cores.
results-questions-real: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -m mmkv_bench experiment=questions
	$(BIN)/python -m mmkv_bench tables results/questions_real --questions > results/questions_real/tables.md
	$(BIN)/python -m mmkv_bench pack $(PACK) results/questions_real

# Two model families side by side; what was run before is not run again.
matrix: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.matrix --processes 2 --write results/matrix

bench-statistics: $(STAMP)
	$(BIN)/python -P benchmarks/statistics.py

bench-fork: $(STAMP)
	$(BIN)/python -P benchmarks/fork.py

bench-real: $(STAMP)
	$(BIN)/python -m mmkv_bench fetch model smollm2_135m_q4_1
	$(BIN)/python -P benchmarks/fork.py --pretrained smollm2_135m_q4_1_english --dataset english_needles --samples 2 --write results/bench/fork_real.md

bench-decode: $(STAMP)
	$(BIN)/python -P benchmarks/decode.py

bench-stream: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/stream.py

bench-questions: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/questions.py

# Fifty answers drawn from all committed rows, made again: another draw with SEED=1, more with SAMPLES=200.
verify: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m mmkv_bench verify --samples $(or $(SAMPLES),50) --seed $(or $(SEED),0)

bench-tables: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/tables.py --write results/bench/tables.md

# Stores of 10,000 cells x 100 samples and 200 x 20,000, and at half the rows, in a temporary folder; tens of minutes.
bench-store: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/store.py --scale $(or $(SCALE),1) --write results/bench/store.md

bench-start: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/start.py --write results/bench/start.md

bench-gpu: $(STAMP)
	$(BIN)/python -P benchmarks/gpu.py

bench-methods: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -P benchmarks/methods.py

simulate: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.simulate

# Two processes, a quarter of an hour; the report holds all cells.
simulate-levels: $(STAMP)
	@lines=$$(mktemp -d); export OMP_NUM_THREADS=1; \
	$(BIN)/python -m tools.levels --shapes "single,1 to 7" >$$lines/a & first=$$!; \
	$(BIN)/python -m tools.levels --shapes "geometric,rare big" >$$lines/b && wait $$first && \
	cat $$lines/a $$lines/b >$$lines/all && $(BIN)/python -m tools.levels --report $$lines/all >results/bench/levels.md

docs: $(STAMP)
	$(BIN)/python -m tools.methods_page
	$(BIN)/python -m tools.datasets_page
	$(BIN)/python -m tools.models_page
	$(BIN)/python -m tools.cells_page

# From the rows below ROWS, one or several folders with commas; without any every cell says what would run it. Stand-ins are filled
# from rows in git, whose last ones experiment=standin/likelihood, standin/answers and standin/efficiency made.
PAPERS := $(RUN) papers $(if $(ROWS),--rows $(ROWS))
papers: $(STAMP)
	mkdir -p runs/papers_pages
	for form in md csv html; do $(PAPERS) all --format $$form > runs/papers_pages/tables.$$form || exit 1; done
	$(BIN)/python -m tools.reproducibility_page $(ROWS)
	$(RUN) papers standins --out results/tiny/papers

size: $(STAMP)
	$(BIN)/python -m tools.size

# Links that lead nowhere fail it. Open site/index.html, from the folder or from any server.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --clean -f tools/site/mkdocs.yml -d $(CURDIR)/site

notebooks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.notebooks

# Downloads the wheel of every-eval-ever (for Python 3.12) to read its schema.
check-export: $(STAMP)
	$(BIN)/python tools/check_export.py $(RECORDS)

check-platforms: $(STAMP)
	$(BIN)/python tools/check_platforms.py --uv $(BIN)/uv $(CHECK)

# Versions that are locked stay where pyproject.toml still allows them; `make lock UPGRADE=1` takes the newest.
lock: $(STAMP)
	$(if $(UPGRADE),: > $@.tmp,cp requirements.lock $@.tmp)
	$(BIN)/uv pip compile pyproject.toml --extra dev --extra slurm --extra notebooks --universal --python-version 3.11 \
		--no-annotate --no-header --quiet --output-file $@.tmp
	{ echo '# Exact versions that resolve together for Python >= 3.11; made from pyproject.toml by `make lock`, do not edit.'; \
		cat $@.tmp; } > requirements.lock
	rm $@.tmp

# An interrupted install leaves no stamp and is continued. The package itself is installed editable. TORCH_BACKEND=cpu takes
# torch from PyTorch's own CPU wheels, which uv knows by that name; the lock's CUDA packages are then not installed.
ifdef TORCH_BACKEND
LOCKED := --torch-backend $(TORCH_BACKEND) -c requirements.lock -r pyproject.toml --extra dev --extra slurm
else
LOCKED := -r requirements.lock
endif
$(STAMP): pyproject.toml requirements.lock
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(NEW_ENOUGH)'; then \
		echo "mmkv_bench needs Python >= 3.11; found: $$($(or $(PYTHON),python3) --version 2>&1 || true). Install one, or name it:" \
			"make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --python $(BIN)/python $(LOCKED)
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@
