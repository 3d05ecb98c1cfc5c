"""A run, top to bottom: plan the cells, say what will happen, generate what is missing, score it, print the tables."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config import as_list, resolve_path
from mmkv_bench.planning import facts as facts_of
from mmkv_bench.planning.card import PromptSize, render
from mmkv_bench.planning.cells import Cell, bases, build_methods, expand
from mmkv_bench.planning.compose import method_defaults
from mmkv_bench.planning.preview import card_facts
from mmkv_bench.planning.progress import Progress
from mmkv_bench.planning.validate import validate_combinations
from mmkv_bench.store.store import Store
from mmkv_bench.store.tracking import RunningMeans, Tracker, tracker

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.evaluation.contract import TaskSpec
    from mmkv_bench.models.load import LoadedModel


def run(config: DictConfig) -> int:
    """Run a validated configuration. Returns 0, or 1 when some row failed (the rows say how).

    Raises:
        MMKVError: what stops the run as a whole, with its exit code.
    """
    started = time.perf_counter()
    store = Store(Path(config.out).expanduser())
    store.check_writable()
    track = tracker(_logger(config), store.root)
    specs = _specs(config)
    config = _with_labels(config, specs)
    _quiet_libraries()
    facts, provenance = facts_of.gather(config, specs)
    defaults = method_defaults(bases(config), tuple(config.folders))
    cells, notes = expand(config, facts, defaults)
    _check_family(config, defaults)
    store.recover()
    work = {label: [cell for cell in cells if cell.dataset == label] for label in specs}
    todo, samples, rows_done = _todo(config, store, specs, work)
    loaded = _load(config) if config.stage != "score" and any(todo.values()) else None
    prompts = _first_prompts(config, specs, loaded) if loaded else {}
    print(render(card_facts(config, cells, samples, rows_done, prompts, loaded, str(store.root), notes)), flush=True)
    report = _Report(config, cells, store, specs)
    track.start({"run": _plain(config), "cells": [cell.label for cell in cells]})
    failed, ended = 0, False
    try:
        if loaded is not None:
            _keep_cells(store, config, cells, provenance)
            failed = _generate(config, loaded, store, specs, work, todo, track)
        if config.stage != "generate":
            report.scored = _score(store, specs, work)
        ended = True
    finally:
        rows = report.metrics() if ended else []
        track.finish(rows, failed=not ended or failed > 0)
    report.close(todo, failed, time.perf_counter() - started)
    return 1 if failed else 0


# ---------------------------------------------------------------------- planning
def _specs(config: DictConfig) -> dict[str, TaskSpec]:
    """Dataset label -> task. The label carries the page size, so that small and large never share a table."""
    from mmkv_bench.evaluation import spec_from_config

    specs = {}
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), _plain(node))
        specs[spec.name if spec.is_pages else spec.dataset] = spec
    return specs


def _with_labels(config: DictConfig, specs: Mapping[str, TaskSpec]) -> DictConfig:
    from omegaconf import OmegaConf

    config = config.copy()
    nodes = list(config.datasets.values())
    OmegaConf.set_struct(config, False)
    config.datasets = dict(zip(specs, nodes, strict=True))
    return config


def _plain(node: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=True)


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
    from mmkv_bench.models.load import load_config

    family = family_of(load_config(resolve_path(config.model.path), config.model.revision))
    validate_combinations(config, family, build_methods(config, defaults))


def _todo(
    config: DictConfig, store: Store, specs: Mapping[str, TaskSpec], work: Mapping[str, Sequence[Cell]]
) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Per dataset: samples of this shard that some cell has no row for, all samples of this shard, rows there are."""
    from mmkv_bench.evaluation import sample_refs
    from mmkv_bench.planning.shards import mine

    todo, samples, rows = {}, {}, {}
    for label, spec in specs.items():
        done = store.done([cell.cell for cell in work[label]], list(config.retry))
        wanted = [ref.sample_id for ref in sample_refs(spec, config.limit) if mine(ref.cluster, config.shard)]
        todo[label] = sum(any(sample not in have for have in done.values()) for sample in wanted)
        samples[label] = len(wanted)
        rows[label] = sum(sample in have for have in done.values() for sample in wanted)
    return todo, samples, rows


def _first_prompts(config: DictConfig, specs: Mapping[str, TaskSpec], loaded: LoadedModel) -> dict[str, PromptSize]:
    """Sizes of each dataset's first prompt; one that cannot be read is left out here and gets its row later."""
    from mmkv_bench.evaluation import generate
    from mmkv_bench.generation.encode import context_cut, encode

    sizes = {}
    for label, spec in specs.items():
        found: list[Any] = []
        generate(spec, lambda request, found=found: found.append(request) or "", 1)
        if not found or found[0].error is not None:
            continue
        prompt = encode(loaded.processor, loaded.family, "card", found[0].messages, found[0].images, found[0].videos)
        context = prompt.length
        if as_list(config.protocol) == ["query_agnostic"]:
            context = context_cut(prompt, loaded.family)
        sizes[label] = PromptSize(prompt.length, prompt.visual_tokens, context)
    return sizes


def _keep_cells(store: Store, config: DictConfig, cells: Sequence[Cell], provenance: Mapping[str, Any]) -> None:
    common = {key: provenance[key] for key in ("git_commit", "git_dirty", "versions", "device", "driver", "cpu")}
    resolved = json.dumps(_plain(config), sort_keys=True)
    store.write_cells([cell.row() | common | {"config": resolved} for cell in cells])


# ---------------------------------------------------------------------- stages
def _generate(
    config: DictConfig,
    loaded: LoadedModel,
    store: Store,
    specs: Mapping[str, TaskSpec],
    work: Mapping[str, Sequence[Cell]],
    todo: Mapping[str, int],
    track: Tracker,
) -> int:
    """Answer what is missing; returns how many rows failed."""
    from mmkv_bench.evaluation import generate
    from mmkv_bench.planning.generate import Answering

    failed = 0
    worker = f"w{os.getpid()}-{str(config.shard).replace('/', 'of')}"
    with store.writer(worker) as writer:
        for label, spec in specs.items():
            if not todo[label]:
                continue
            cells = work[label]
            done = store.done([cell.cell for cell in cells], list(config.retry))
            means = RunningMeans()
            with Progress(todo[label], f"{label}, {len(cells)} cells") as bar:

                def after(rows, bar=bar, means=means, label=label):
                    bar.advance()
                    values = {f"{label}/{name}": _mean(rows, name) for name in ("prefill_s", "decode_s", "n_tokens")}
                    values[f"{label}/failed"] = sum(row["status"] != "ok" for row in rows)
                    track.log(means.add(values))

                answering = Answering(loaded, config, cells, done, writer, after)
                try:
                    generate(spec, answering, config.limit, answering.wants)
                finally:
                    answering.close()
            failed += answering.tally.failed
    return failed


def _load(config: DictConfig) -> LoadedModel:
    from mmkv_bench.models.load import load_model

    model = config.model
    return load_model(
        model.name,
        resolve_path(model.path),
        revision=model.revision,
        dtype=model.dtype,
        attention=model.attention,
        device=model.device,
        device_map=model.device_map,
        min_pixels=model.min_pixels,
        max_pixels=model.max_pixels,
    )


def _score(store: Store, specs: Mapping[str, TaskSpec], work: Mapping[str, Sequence[Cell]]) -> int:
    from mmkv_bench.planning.scoring import score_dataset, unscored

    scored = 0
    for label, spec in specs.items():
        stale = unscored(store, work[label])
        if stale:
            with Progress(len(stale), f"scoring {label}", unit="cells") as bar:
                scored += score_dataset(store, spec, work[label], lambda cell, bar=bar: bar.advance())
    return scored


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) / len(values) if values else None


def _quiet_libraries() -> None:
    """Progress bars and advice of libraries do not belong among ours; their errors still reach us as exceptions."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


# ---------------------------------------------------------------------- what a person sees
class _Report:
    """What a run prints at its end: tables, where the rows are, what failed, and one JSON document if asked."""

    def __init__(self, config: DictConfig, cells: Sequence[Cell], store: Store, specs: Mapping[str, TaskSpec]):
        self.config, self.cells, self.store, self.specs = config, cells, store, specs
        self.scored = 0

    def metrics(self) -> list[dict[str, Any]]:
        return self.store.metrics([cell.cell for cell in self.cells]).to_pylist()

    def close(self, todo: Mapping[str, int], failed: int, seconds: float) -> None:
        if not any(todo.values()) and not self.scored:
            print("Nothing to do: every cell has every sample, and all of them are scored.")
        if self.config.stage != "generate":
            print(self._tables())
        print(f"rows: {self.store.root}   (python -m mmkv_bench.tables {self.store.root} prints the tables again)")
        if failed:
            print(f"{failed} rows failed; their status says how, and retry=[oom,timeout,nan,error] runs them again")
        if self.config.json:
            document = {
                "rows": str(self.store.root),
                "cells": len(self.cells),
                "generated": dict(todo),
                "failed": failed,
                "seconds": round(seconds, 3),
                "metrics": self.metrics(),
            }
            sys.stdout.flush()
            print(json.dumps(document, default=str))

    def _tables(self) -> str:
        from mmkv_bench.tables.build import build
        from mmkv_bench.tables.render import markdown
        from mmkv_bench.tables.rows import load

        rows = load(self.store.root)
        mine = {cell.cell for cell in self.cells}
        rows.cells = rows.cells[rows.cells["cell"].isin(mine)]
        rows.samples = rows.samples[rows.samples["cell"].isin(mine)]
        rows.responses = rows.responses[rows.responses["cell"].isin(mine)]
        rows.metrics = rows.metrics[rows.metrics["cell"].isin(mine)]
        headlines = {metric for spec in self.specs.values() for metric in spec.metrics}
        if headlines and all(spec.metrics for spec in self.specs.values()):  # a mix's kinds stay in the rows
            rows.samples = rows.samples[rows.samples["metric"].isin(headlines)]
        return markdown(build(rows))
