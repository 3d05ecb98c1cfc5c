"""Promise: the experiments of conf/experiment/papers plan the cells of the papers' tables, all of them and no others."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from functools import cache

import pytest

from mmkv_bench.config.compose import compose
from mmkv_bench.config.files import conf_dir, options
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.efficiency.plan import plan_passes as plan_of_passes
from mmkv_bench.evaluation.documents import generation_settings
from mmkv_bench.papers import evidence
from mmkv_bench.papers.address import MEAN, SYNTHETIC, Address, MethodSettings, canonical
from mmkv_bench.papers.layout import load, table_ids
from mmkv_bench.papers.non_score_metrics import has_numbers
from mmkv_bench.papers.runs import SETTING, artefact, command, setting
from mmkv_bench.plan.cells import DatasetIdentity, Identity, expand, method_entries
from tests.papers.genuine import genuine
from tests.tables.examples import cell_row

SETTINGS = [
    name for name in options("experiment") if name.startswith(SETTING) and name != "efficiency_hybrid"
]  # no paper's
NAMES = sorted(file.stem for file in (conf_dir() / "experiment" / "papers").glob("*.yaml"))


def planned(name: str) -> set[tuple]:
    """The cells of an experiment, as no model and no data are needed to know them."""
    config = compose([f"experiment=papers/{name}"])
    assert config.limit is None, f"{name} asks a part of the questions"
    datasets = {
        str(one): DatasetIdentity("d", generation=config.datasets[one]["generation"]) for one in config.datasets
    }
    world = Identity("m", None, "bfloat16", "t", "t", datasets)
    cells, _ = expand(config.grid, world, method_entries(config.method_config), lacking=[])
    told = set()
    for cell in cells:
        length = config.datasets[cell.dataset]["generation"]["max_new_tokens"]
        key = (cell.model, cell.dataset, cell.base, canonical(cell.base, cell.parameters), cell.reading or "")
        file = (config.variants.get(cell.method) or {}).get("calibration", "auto")
        budget = cell.budget_fraction or cell.budget_entries or ""
        cut = config.datasets[cell.dataset]["generation"].get("cut_prompt")
        own = "" if file == "auto" else file
        told.add((*key, own, cell.protocol, str(budget), cell.seed, length, config.model.frames, cut))
    return told


def wanted(name: str) -> dict[tuple, list[Address]]:
    """The addresses of a table's numbers that a run can fill, by what a cell of a plan says of them."""
    found: dict[tuple, list[Address]] = {}
    for one in load(name).needed_addresses:
        if not one.runs or not has_numbers(one.metric) or one.dataset in SYNTHETIC:
            continue
        for method in filter(None, (one.method, one.minus)):
            reading = "" if method.base == "full" else one.reading
            key = (one.model, one.dataset, method.base, method.parameters(one.reading), reading)
            key = (*key, artefact(replace(one, method=method)), one.protocol)
            found.setdefault((*key, "" if method.unbudgeted else one.budget), []).append(one)
    return found


def timed(name: str) -> list[Address]:
    """The addresses of a table's numbers that a timed pass holds, those that can be run."""
    return [cell.address for cell in load(name).cells if cell.address.dataset in SYNTHETIC and cell.address.runs]


def check(experiments: list[str], tables: list[str]) -> None:
    plan = set().union(*map(planned, experiments))
    asked: dict[tuple, list[Address]] = {}
    for name in tables:
        for key, addresses in wanted(name).items():
            asked.setdefault(key, []).extend(addresses)
    assert {cell[:8] for cell in plan} == {*asked}
    by_key: dict[tuple, list[tuple]] = {}
    for cell in plan:
        by_key.setdefault(cell[:8], []).append(cell[8:])
    for key, addresses in asked.items():
        for one in addresses:
            had = by_key[key]
            seeds = {seed for seed, *_ in had}
            assert seeds == {None} or {*one.seeds} <= seeds, f"{one}: seeds"
            assert one.max_new_tokens is None or one.max_new_tokens in {length for _, length, *_ in had}, str(one)
            assert one.frames is None or one.frames in {frames for _, _, frames, _ in had}, str(one)
            assert one.cut_prompt is None or {one.cut_prompt} == {cut for *_, cut in had}, str(one)


def test_every_experiment_is_named_by_a_table_and_every_table_that_runs_names_its_own():
    named = {name for table in table_ids() for name in load(table).experiments}
    assert named == {*NAMES, *SETTINGS}
    assert all(load(table).experiments for table in table_ids() if wanted(table))


def test_every_timed_pass_of_a_table_has_a_setting_and_its_command_names_it():
    for table in table_ids():
        names = load(table).experiments
        for one in timed(table):
            assert setting(one, names) in {*SETTINGS}, f"{table}: {one}"
            assert command(one, names) == f"mmkv-bench experiment={setting(one, names)}"


def test_a_cells_own_command_asks_every_question_under_the_tables_conditions():
    (one,) = [
        cell.address
        for cell in load("mmshift_table07").cells
        if cell.address.dataset == "textcaps" and cell.address.method.setting("tau") == 0.99
    ]
    config = compose(shlex.split(command(one))[1:])
    assert config.limit is None and list(config.seed) == [0, 1, 2]
    assert config.datasets["textcaps"]["generation"]["max_new_tokens"] == 64


@pytest.mark.full
def test_the_settings_plan_the_timed_passes_of_the_tables():
    plans = {name: plan_of_passes(compose([f"experiment={name}"]), outline=True) for name in SETTINGS}
    for table in table_ids():
        for one in timed(table):
            plan = plans[setting(one, load(table).experiments)]
            shapes = {(unit.cell, unit.tokens, unit.batch) for unit in plan.units}
            keys = {
                (cell.base, canonical(cell.base, cell.parameters), str(cell.budget_fraction or cell.budget_entries or "")):
                cell.cell for cell in plan.cells
            }  # fmt: skip
            cell = keys[one.method.base, one.method.parameters(one.reading), one.budget]
            assert (cell, one.length, one.batch or 1) in shapes, f"{table}: {one}"


@pytest.mark.slow
def test_a_tables_experiments_plan_its_cells():
    tables = [table for table in table_ids() if {*load(table).experiments} == {"flashcache_favor"}]
    check(["flashcache_favor"], tables)


@pytest.mark.full
def test_all_experiments_together_plan_the_cells_of_all_tables():
    check(NAMES, list(table_ids()))


@pytest.mark.full
def test_what_the_experiments_make_counts_as_evidence():
    """The settings of the runs, with what the tasks say of decoding, are what addresses ask for."""
    plans: dict[str, list[dict]] = {}
    for name in NAMES:
        made = _settings(f"papers/{name}")
        plans.setdefault(made["model"]["name"], []).append(made)
    asked = {}
    for table in table_ids():
        for one in load(table).needed_addresses:
            if one.runs and has_numbers(one.metric) and one.metric != MEAN:
                key = (one.model, one.dataset, one.max_new_tokens, one.cut_prompt, one.frames, one.length)
                asked.setdefault(key, (table, replace(one, method=MethodSettings("full"))))
    wrong = set()
    for table, one in asked.values():
        timed_at = one.dataset in SYNTHETIC
        runs = [_settings(setting(one, load(table).experiments))] if timed_at else plans.get(one.model, [])
        runs = [run for run in runs if timed_at or one.dataset in run["datasets"]]
        if all(evidence.contradictions(one, evidence.facts_of(_row(one, run))) for run in runs):
            wrong.add((table, one.dataset.partition("_")[0]))
    assert not wrong


@cache
def _settings(name: str) -> dict:
    return dict(compose([f"experiment={name}"]).resolved)


def _row(one: Address, run: dict) -> dict:
    generation = {}
    if one.dataset not in SYNTHETIC:
        spec = spec_from_config(one.dataset, run["datasets"][one.dataset])
        generation = generation_settings(spec)
    made = genuine(one.model, one.dataset, "full", config=json.dumps(run), weights=run["model"]["weights"])
    return cell_row("c", "full", **made) | {"generation": json.dumps(generation)}
