"""A run, top to bottom: plan the cells, say what will happen, generate what is missing, score it, print the tables."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import as_list
from mmkv_bench.errors import ConfigError, DataError, ScoringError, UnsupportedError
from mmkv_bench.judging.configured import ledger_of, summary
from mmkv_bench.models.source import HUB, Source
from mmkv_bench.plan import identity
from mmkv_bench.plan.cells import Cell, bases, build_methods, expand
from mmkv_bench.plan.changed import changed_answers
from mmkv_bench.plan.parts import Part, failures, parts_of
from mmkv_bench.plan.validate import validate_combinations
from mmkv_bench.protocols import WHOLE, protocol
from mmkv_bench.run.card import PromptSize, render
from mmkv_bench.run.preview import card_facts
from mmkv_bench.run.progress import Progress
from mmkv_bench.run.report import Report, plain
from mmkv_bench.store.store import Store
from mmkv_bench.store.tracking import NoTracker, RunningMeans, Tracker, tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.datasets.task_spec import TaskSpec
    from mmkv_bench.judging.ledger import Ledger
    from mmkv_bench.models.load import LoadedModel


def run(config: DictConfig) -> int:
    """Run a validated configuration. Returns 0, or 1 when some row of the run is a failure (the rows say how), or one of
    several datasets stopped for what is wrong with its data or scorer (said at the end).

    Raises:
        MMKVError: what stops the run as a whole, with its exit code.
    """
    started = time.perf_counter()
    store = Store(Path(config.out).expanduser())
    store.check_writable()
    track = tracker(_logger(config), store.root)
    judge = ledger_of(config, store.root)
    config, cells, parts, provenance, notes = _plan(config)
    store.recover()
    _refuse_other_sharing(config, store, cells)
    changed, beside = changed_answers(config, store, parts)
    parts = [replace(part, changed=changed) for part in parts]
    todo = {part.dataset: part.missing(store, list(config.retry)) for part in parts}
    generating = config.stage != "score" and any(todo.values())
    loaded = _load(config) if generating else None
    if loaded:
        Source.of(config.model).confirm(cells[0].model_fingerprint)
        _check_generation(loaded, [part for part in parts if todo[part.dataset]])
    prompts = _first_prompts(config, parts, loaded) if loaded else {}
    samples = {part.dataset: len(part.samples) for part in parts}
    done = {part.dataset: part.rows(store, list(config.retry)) for part in parts}
    print(
        render(card_facts(config, cells, samples, done, prompts, loaded, str(store.root), [*notes, *beside])),
        flush=True,
    )
    stale = [] if config.stage == "generate" else _stale(store, parts, judge)
    if not generating and not stale:  # nothing to follow, and a finished run writes nothing
        track = NoTracker()
    track.start({"run": plain(config), "cells": [cell.label for cell in cells]})
    metrics, scored, ended = [], 0, False
    stopped: dict[str, str] = {}
    try:
        if loaded is not None:
            _keep_cells(store, config, cells, provenance)
            store.forget_scores(changed)
            _generate(config, loaded, store, parts, todo, track, stopped)
        if config.stage != "generate":
            stale = _stale(store, parts, judge)
            scored = _score(store, parts, stale, judge, stopped)
        metrics = store.metrics([cell.cell for cell in cells]).to_pylist()
        failed = failures(store, parts)
        ended = True
    finally:
        track.finish(metrics, failed=not ended or failed > 0 or bool(stopped))
    report = Report(config, cells, store, parts, metrics)
    seconds, asked = time.perf_counter() - started, summary(judge, metrics)
    report.close(todo if generating else dict.fromkeys(todo, 0), scored, failed, seconds, asked, stopped)
    return 1 if failed or stopped else 0


def unanswered(config: DictConfig) -> int:
    """How many samples of the run some cell has no row for: 0 when every process of a split run did its part."""
    store = Store(Path(config.out).expanduser())
    return sum(part.missing(store) for part in planned(config))


def planned(config: DictConfig) -> list[Part]:
    """The parts of a run with their cells, in the order of its datasets; nothing is generated."""
    return _plan(config)[2]


# ---------------------------------------------------------------------- planning
def _plan(config: DictConfig) -> tuple[DictConfig, list[Cell], list[Part], dict[str, Any], list[str]]:
    """The configuration with datasets under their labels, all cells, their datasets' parts of this shard, the
    provenance of the cells' rows, and notes for the card."""
    from mmkv_bench.datasets.sources import preflight

    specs = _specs(config)
    stay_offline(config, specs)
    for spec in specs.values():
        preflight(spec)
    config = _with_labels(config, specs)
    quiet_libraries()
    facts, provenance = identity.gather(config, specs)
    defaults = method_defaults(bases(config), tuple(config.folders))
    cells, notes = expand(config, facts, defaults)
    _check_family(config, defaults)
    return config, cells, parts_of(config, specs, cells), provenance, notes


def _specs(config: DictConfig) -> dict[str, TaskSpec]:
    """Dataset label -> task. The label tells page size and split, so that two of them never share a table."""
    from mmkv_bench.datasets.specs import spec_from_config

    specs: dict[str, TaskSpec] = {}
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), plain(node), plain(config.data))
        if spec.dataset in specs:
            raise ConfigError(f"datasets.{name} is {spec.dataset}, which this run has already; drop one of the two")
        specs[spec.dataset] = spec
    return specs


def stay_offline(config: DictConfig, specs: Mapping[str, TaskSpec]) -> None:
    """Keep the Hugging Face libraries from asking a hub where nothing of this run is there; before they are imported."""
    from mmkv_bench.evaluation import go_offline

    if all(spec.offline for spec in specs.values()) and Source.of(config.model).kind != HUB:
        go_offline()


def _with_labels(config: DictConfig, specs: Mapping[str, TaskSpec]) -> DictConfig:
    from omegaconf import OmegaConf

    config = config.copy()
    nodes = list(config.datasets.values())
    OmegaConf.set_struct(config, False)
    config.datasets = dict(zip(specs, nodes, strict=True))
    return config


def _logger(config: DictConfig) -> dict[str, Any]:
    if config.logger.kind == "none":
        return {"name": "none"}
    return {
        "name": config.logger.kind,
        "mode": config.logger.mode,
        "project": config.logger.project,
        "entity": config.logger.entity,
        "run": config.logger.name,
    }


def _check_family(config: DictConfig, defaults: Mapping[str, Any]) -> None:
    from mmkv_bench.models.families import family_of

    family = family_of(Source.of(config.model).hf_config())
    validate_combinations(config, family, build_methods(config, defaults))


def _refuse_other_sharing(config: DictConfig, store: Store, cells: Sequence[Cell]) -> None:
    """Answers are the same with and without sharing, times and memory are not: never reuse the one kind as the other.

    Raises:
        ConfigError: the store holds rows of these cells that were measured the other way.
    """
    if config.stage == "score":
        return
    wanted, switch = ("own", "off") if config.sharing == "off" else ("group", "on")
    found = set(store.responses([cell.cell for cell in cells], ["measured"])["measured"].to_pylist()) - {wanted}
    if found:
        raise ConfigError(
            f"sharing={switch} asks for rows measured={wanted}, and {store.root} holds rows of these cells with "
            f"measured={found.pop()}; give another folder (out=<folder>), or sharing={'on' if switch == 'off' else 'off'}"
        )


def _check_generation(loaded: LoadedModel, parts: Sequence[Part]) -> None:
    """Refuse generation settings that cannot be honoured before any work, not once in every row."""
    from mmkv_bench.evaluation import generation_settings
    from mmkv_bench.run.generate import decode_rules

    for part in parts:
        try:
            decode_rules(loaded, generation_settings(part.spec))
        except UnsupportedError as error:
            raise UnsupportedError(f"{part.dataset}: {error}") from error


def _hold(found: list[Any], request: Any) -> str:
    found.append(request)
    return ""


def _first_prompts(config: DictConfig, parts: Sequence[Part], loaded: LoadedModel) -> dict[str, PromptSize]:
    """Sizes of each dataset's first prompt; one that cannot be made is left out here and gets its row later."""
    from mmkv_bench.evaluation import generate
    from mmkv_bench.generation.encode import lengths_of
    from mmkv_bench.run.generate import encoded

    sizes = {}
    for part in parts:
        found: list[Any] = []
        generate(part.spec, partial(_hold, found), 1)
        if not found or found[0].error is not None:
            continue
        request = found[0]
        try:
            prompt = encoded(loaded, config, request, "card", "cpu")
            asked = [name for name in as_list(config.protocol) if name in WHOLE] or as_list(config.protocol)
            context = lengths_of(protocol(asked[0]), prompt, loaded.family).reduced
        except Exception:  # noqa: BLE001, S112 - whatever a processor makes of it will be that sample's status
            continue
        sizes[part.dataset] = PromptSize(prompt.length, prompt.visual_tokens, context)
    return sizes


def _keep_cells(store: Store, config: DictConfig, cells: Sequence[Cell], provenance: Mapping[str, Any]) -> None:
    origin = ("git_commit", "git_dirty", "versions", "device", "driver", "cpu", "weights")
    common = {key: provenance[key] for key in origin}
    resolved = plain(config)
    store.write_cells(
        [cell.row() | common | {"config": json.dumps(resolved | cell.told(), sort_keys=True)} for cell in cells]
    )


# ---------------------------------------------------------------------- stages
def _generate(
    config: DictConfig,
    loaded: LoadedModel,
    store: Store,
    parts: Sequence[Part],
    todo: Mapping[str, int],
    track: Tracker,
    stopped: dict[str, str],
) -> None:
    """Answer what is missing; `stopped` takes the datasets that could not be."""
    from mmkv_bench.evaluation import generate
    from mmkv_bench.run.generate import Answering

    worker = f"w{os.getpid()}-{str(config.shard).replace('/', 'of')}"
    with store.writer(worker) as writer:
        for part in parts:
            label = part.dataset
            if not todo[label]:
                continue
            means = RunningMeans()
            with Progress(todo[label], f"{label}, {len(part.cells)} cells") as bar:

                def after(rows, bar=bar, means=means, label=label):
                    bar.advance()
                    values = {f"{label}/{name}": _mean(rows, name) for name in ("prefill_s", "decode_s", "n_tokens")}
                    values[f"{label}/failed"] = sum(row["status"] != "ok" for row in rows)
                    track.log(means.add(values))

                done = part.done(store, list(config.retry))
                answering = Answering(loaded, config, part.cells, done, writer, after, part.spec.measures)
                try:
                    with _one_of(parts, label, stopped):
                        generate(part.spec, answering, config.limit, answering.wants)
                finally:
                    answering.close()


@contextmanager
def _one_of(parts: Sequence[Part], label: str, stopped: dict[str, str]) -> Iterator[None]:
    """Work on one dataset: where there are others, what is wrong with its data or scorer is kept and stops no other."""
    try:
        yield
    except (DataError, ScoringError) as error:
        if len(parts) == 1:
            raise
        stopped[label] = str(error)


def _load(config: DictConfig) -> LoadedModel:
    return Source.of(config.model).load()


def _stale(store: Store, parts: Sequence[Part], judge: Ledger) -> list[str]:
    """Cells with answers that are not scored yet, or not by this judge."""
    from mmkv_bench.run.scoring import unscored

    return [cell for part in parts for cell in unscored(store, part.cells, judge)]


def _advance(bar: Progress, cell: Cell) -> None:
    bar.advance()


def _score(store: Store, parts: Sequence[Part], stale: Sequence[str], judge: Ledger, stopped: dict[str, str]) -> int:
    """Score what is stale; `stopped` takes the datasets that could not be. Returns how many cells were scored."""
    from mmkv_bench.run.scoring import score_dataset

    done = 0
    for part in parts:
        mine = sum(cell.cell in stale for cell in part.cells)
        if mine:
            label = f"scoring {part.dataset}"
            with Progress(mine, label, unit="cells") as bar, _one_of(parts, label, stopped):
                done += score_dataset(store, part.spec, part.cells, partial(_advance, bar), judge)
    return done


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def quiet_libraries() -> None:
    """Progress bars and advice of libraries do not belong among ours; their errors still reach us as exceptions."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try; the last one's error is ours
