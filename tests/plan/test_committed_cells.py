"""The cells of every committed store are planned again under the hashes that they are stored under."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pytest

from mmkv_bench.cli.verbs.published_rows import stores_with_answers
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.diagnostics.replanned_cells import cells_again, run_config
from mmkv_bench.plan.cells import DatasetIdentity, Identity
from mmkv_bench.store.store import Store
from tests.each import each

RESULTS = conf_dir().parent / "results"
ROOTS = [*stores_with_answers(RESULTS / "tiny"), *stores_with_answers(RESULTS)]
OLDER = {
    "ablations": {
        ("look_m", "paper"): 4,
        ("look_m_average", "paper"): 4,
        ("look_m_no_prior", "paper"): 4,
        ("look_m_weighted", "paper"): 4,
        ("meda", "paper"): 4,
        ("meda_uniform", "paper"): 4,
    },
    "dev_variants": {
        ("mmshift", "paper"): 3,
        ("mmshift", "released"): 3,
        ("mmshift_gamma1", "paper"): 3,
        ("mmshift_gamma3", "paper"): 3,
        ("snapkv", "paper"): 3,
        ("snapkv", "released"): 3,
        ("snapkv_w8", "paper"): 3,
    },
    "large": {("expected_attention", "paper"): 8, ("mmshift", "paper"): 8, ("snapkv", "paper"): 8},
    "large_protocols": {("expected_attention", "paper"): 16, ("mmshift", "paper"): 16, ("snapkv", "paper"): 16},
    "methods": {
        ("look_m", "paper"): 216,
        ("meda", "paper"): 216,
        ("mmshift", "paper"): 216,
        ("mmshift_adakv", "paper"): 216,
        ("mmshift_pyramidkv", "paper"): 216,
        ("mmshift_sparsemm", "paper"): 216,
    },
    "readings": {
        ("look_m", "paper"): 20,
        ("meda", "paper"): 20,
        ("mmshift", "paper"): 20,
        ("prefixkv", "released"): 20,
        ("sparsemm", "released"): 20,
    },
}
"""Store -> (method, reading) -> number of cells that an older identity made: parameters and numbers that came later, until
these rows are made again. Every other cell has to come out equal; of these as many more as will."""


@cache
def defaults():
    return method_defaults(options("method"))


def facts_of(row, specs, rows) -> Identity:
    """What the stored rows say of model, data and versions, so that neither is opened."""
    found = {}
    for one in rows:
        spec = specs[one["dataset"]]
        prompt = {"task": spec.name, "size": spec.size, "split": spec.split}
        keys = {"context": spec.context_key, "questions": spec.questions_key}
        found[one["dataset"]] = DatasetIdentity(
            one["dataset_fingerprint"], prompt, json.loads(one["generation"]), **keys
        )
    names = ("model_fingerprint", "model_revision", "dtype", "torch", "transformers")
    return Identity(**{name: row[name] for name in names}, datasets=found)


def planned(stored: Mapping[str, Any], rows) -> set[str]:
    """Hashes that one run's stored configuration plans now."""
    config = run_config(stored, {row["dataset"] for row in rows}, {row["method"] for row in rows})
    specs = {}
    for name, node in stored["datasets"].items():
        spec = spec_from_config(name, node)
        specs[spec.dataset] = specs[name] = spec
    return {
        cell.cell for cell in cells_again(config.grid, config.method_config, facts_of(rows[0], specs, rows), defaults())
    }


def runs_of(root: Path) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """(configuration, rows of its cells) of every run of a store; a configuration's long text is handled once."""
    table = Store(root).cells()
    configs = table["config"].combine_chunks().dictionary_encode()
    rows = table.drop(["config"]).append_column("run", configs.indices).to_pylist()

    def same(row):
        return row["run"], row["torch"], row["transformers"]

    for (run, *_), together in groupby(sorted(rows, key=same), key=same):
        yield json.loads(configs.dictionary[run].as_py()), list(together)


def again(root: Path, runs: int | None = None) -> tuple[Counter, int]:
    """(method, reading) -> cells of a store's first runs that are planned under another hash now; and of how many cells."""
    lost, count = Counter(), 0
    for stored, rows in islice(runs_of(root), runs):
        found = planned(stored, rows)
        count += len(rows)
        lost.update((row["method"], row["reading"]) for row in rows if row["cell"] not in found)
    return lost, count


def test_all_stores_are_looked_at():
    assert {root.name for root in ROOTS} >= {*OLDER, "real"}


@each("root", ROOTS, keep=4)
def test_the_cells_of_a_stores_first_run_have_the_hash_that_its_configuration_plans(root):
    lost, count = again(root, runs=1)
    assert lost <= Counter(OLDER.get(root.name, {}))
    assert count > lost.total()


@pytest.mark.full
@each("root", ROOTS)
def test_every_committed_cell_has_the_hash_that_its_configuration_plans(root):
    lost, count = again(root)
    known = Counter(OLDER.get(root.name, {}))
    assert lost <= known
    assert count > known.total()
