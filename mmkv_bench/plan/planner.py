"""Makes plans from configurations, without loading weights or drawing pages."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import EFFICIENCY, PACKAGE_SCHEME, Data, Model, RunConfig
from mmkv_bench.errors import ConfigError, MMKVError
from mmkv_bench.families.facts import model_facts
from mmkv_bench.models.load import quiet_libraries
from mmkv_bench.models.source import HUB, Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, expand, method_entries
from mmkv_bench.plan.plan import DatasetShare, Plan
from mmkv_bench.plan.validate import (
    parse_shard,
    validate_combinations,
    validate_decoding,
    validate_questions,
    validate_stream,
)
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    from mmkv_bench.config.schema import Selection
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.evaluation.samples import SampleRef
    from mmkv_bench.families.facts import ModelFacts


def make_plan(config: RunConfig) -> Plan:
    """Return the plan of a validated configuration. Data other than pages are opened if their content is not known
    otherwise.

    Raises MMKVError: a missing model or dataset, or methods or protocols that do not work with them.
    """
    from mmkv_bench.datasets.sources import preflight

    spec_by_label = _checked_tasks(config)
    for spec in spec_by_label.values():
        preflight(spec)
    quiet_libraries()
    dataset_names = list(config.datasets)
    config = config.labelled(spec_by_label).updated(limit=with_limit_for_ids(config.selection, spec_by_label).limit)
    identity, methods = identities.gather(config.model, spec_by_label), method_entries(config.method_config)
    cells, notes = expand(config.grid, identity, methods)
    notes += _default_dataset_note(dataset_names, config.model)
    family = model_facts(Source.of(config.model).described)
    _check(config, spec_by_label, cells, family)
    dataset_parts = [
        _dataset_share(name, spec, cells, config)
        for name, spec in zip(dataset_names, spec_by_label.values(), strict=True)
    ]
    return Plan.of(config, methods, cells, parts=dataset_parts, notes=notes, family=family)


def outline(config: RunConfig, facts: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan of a validated configuration as far as it is known without a connection and without opening data.

    If a fact is unknown (`identity.UNKNOWN`), hashes of cells match no run, but labels and the number of cells are
    right.

    facts: fields of `Identity` from stored rows, which replace those of this machine.

    Raises MMKVError: methods or protocols that do not work with the model, or files that are not a model's.
    """
    spec_by_label = _checked_tasks(config)
    dataset_names = list(config.datasets)
    config = config.labelled(spec_by_label)
    if all(spec.is_pages for spec in spec_by_label.values()):
        config = config.updated(limit=with_limit_for_ids(config.selection, spec_by_label).limit)
    identity = identities.outline(config.model, spec_by_label, Store(Path(config.out).expanduser()).cells())
    identity = replace(identity, **(facts or {}))
    methods, uncalibrated_methods = method_entries(config.method_config), list[str]()
    cells, notes = expand(config.grid, identity, methods, uncalibrated_methods)
    notes += [*uncalibrated_methods, *_default_dataset_note(dataset_names, config.model)]
    described = Source.of(config.model).described_here()
    family = None if described is None else model_facts(described)
    if family is None:
        notes.append(
            f"the files of model {config.model.name} are not on this machine: the run checks what the model supports"
        )
    _check(config, spec_by_label, cells, family)
    dataset_parts = []
    for name, spec in zip(dataset_names, spec_by_label.values(), strict=True):
        dataset_part, part_notes = _outline_dataset_share(name, spec, cells, config)
        dataset_parts.append(dataset_part)
        notes += part_notes
    return Plan.of(
        config, methods, cells, parts=dataset_parts, notes=notes, family=family, uncalibrated=uncalibrated_methods
    )


def _checked_tasks(config: RunConfig) -> dict[str, TaskSpec]:
    """Return dataset label -> task, after checks that need no model. Keep libraries offline if no hub is needed."""
    if config.scenario == EFFICIENCY:
        raise ConfigError(
            "scenario=efficiency times one cell at a time in one process and answers no dataset; start it with mmkv-bench run, "
            "or forecast it with mmkv-bench plan"
        )
    specs = tasks_of(config.datasets, config.data)
    validate_questions(config.protocol, specs, config.answering)
    stay_offline(config.model, specs)
    return specs


def _check(config: RunConfig, specs: Mapping[str, TaskSpec], cells: Sequence[Cell], family: ModelFacts | None) -> None:
    """Refuse a plan whose methods or protocols do not work with the model or the datasets.

    specs: dataset label -> task.
    family: facts about the model; None if unknown.
    """
    uncut_datasets = [name for name, spec in specs.items() if not spec.context_key]
    if family is not None:
        compressors = {(cell.method, cell.reading): cell.compressor for cell in cells}
        validate_combinations(config.protocol, family, compressors.values(), uncut_datasets)
        validate_decoding(family, config.answering)
    streamed_methods = [(cell.compressor, cell.budget) for cell in cells if cell.rule.streams]
    validate_stream(config.decode, streamed_methods, family, uncut_datasets)


def _default_dataset_note(datasets: Sequence[str], model: Model) -> list[str]:
    """Return a note if the user chose a model but not a dataset. The default dataset suits only the embedded model."""
    if list(datasets) != ["pages"] or str(model.path).startswith(PACKAGE_SCHEME):
        return []
    return [
        f"no dataset is chosen for {model.name}, and the default pages are drawn for the embedded model: add dataset=docvqa or "
        "another one of `mmkv-bench data list`"
    ]


# ---------------------------------------------------------------------- datasets
def tasks_of(datasets: Mapping[str, Mapping[str, Any]], data: Data) -> dict[str, TaskSpec]:
    """Map dataset labels to tasks, in order. A label has page size and split, so that two sizes never share a table.

    datasets: name -> the dataset's settings.

    Raises ConfigError: a dataset is given twice, or its settings make no task.
    """
    from mmkv_bench.datasets.specs import spec_from_config

    spec_by_label: dict[str, TaskSpec] = {}
    for name, node in datasets.items():
        spec = spec_from_config(str(name), dict(node), vars(data))
        if spec.dataset in spec_by_label:
            raise ConfigError(f"datasets.{name} is {spec.dataset}, which this run has already; remove one of the two")
        spec_by_label[spec.dataset] = spec
    return spec_by_label


def stay_offline(model: Model, specs: Mapping[str, TaskSpec]) -> None:
    """Keep the Hugging Face libraries, not yet imported, offline if neither model nor data are on a hub."""
    from mmkv_bench.evaluation.environment import go_offline

    if all(spec.offline for spec in specs.values()) and Source.of(model).kind != HUB:
        go_offline()


def _dataset_share(name: str, spec: TaskSpec, cells: Sequence[Cell], config: RunConfig) -> DatasetShare:
    """Return one dataset's part of a plan. Data other than pages are opened.

    name: name of the dataset in the configuration.
    """
    from mmkv_bench.datasets.specs import limited
    from mmkv_bench.evaluation.documents import documents, sample_refs
    from mmkv_bench.evaluation.question_groups import check_questions

    if spec.questions_key:
        dataset_documents, protocols = documents(spec, config.limit), dict.fromkeys(cell.protocol for cell in cells)
        split_documents = dataset_documents.bare[dataset_documents.split]
        check_questions(spec, split_documents, limited(spec, config.limit), protocols)
    samples = [ref.sample_id for ref in select_samples(sample_refs(spec, config.limit), config.selection)]
    return _share(name, spec, cells, samples, config)


def _share(
    name: str, spec: TaskSpec, cells: Sequence[Cell], samples: Sequence[str], config: RunConfig, counted: str = "data"
) -> DatasetShare:
    of_dataset = [cell for cell in cells if cell.dataset == spec.dataset]
    about = config.datasets[spec.dataset].get("about") or {}
    return DatasetShare(name, spec.dataset, spec, of_dataset, samples, about, counted=counted)


def _outline_dataset_share(
    name: str, spec: TaskSpec, cells: Sequence[Cell], config: RunConfig
) -> tuple[DatasetShare, list[str]]:
    """Return one dataset's part of a plan without opening data, and notes about what is unknown.

    Pages are known exactly. Other datasets have the number of samples of their local parquet files, or else of
    `about.samples`. A shard counts as the whole dataset.
    """
    from mmkv_bench.datasets.specs import limited

    if spec.is_pages:
        return _dataset_share(name, spec, cells, config), []
    selection, about = config.selection, config.datasets[spec.dataset].get("about") or {}
    number_of_samples, count_source, amount_note = _number_of_samples(spec, about.get("samples"))
    notes = [amount_note] if amount_note else []
    if selection.shard != "0/1" and number_of_samples:
        notes.append(
            f"only its data tell which samples of {spec.dataset} are in shard {selection.shard}: all are counted"
        )
    samples_in_limit = (
        0 if number_of_samples is None else min(number_of_samples, limited(spec, selection.limit) or number_of_samples)
    )
    samples = [spec.sample_id(number) for number in range(samples_in_limit)]
    samples = [one for one in samples if selection.samples is None or one in selection.samples]
    if selection.samples is not None and not samples and number_of_samples:
        notes.append(f"{spec.dataset} seems to have none of the samples up to limit; its data were not opened")
    return _share(name, spec, cells, samples, config, count_source), notes


def _number_of_samples(spec: TaskSpec, stated: Any) -> tuple[int | None, str, str | None]:
    """Return a dataset's number of samples, `DatasetShare.counted`, and a note or None, without opening data.

    stated: `about.samples` of the dataset's file.
    """
    from mmkv_bench.datasets.sources import local_rows

    try:
        rows = local_rows(spec)
    except MMKVError as error:
        return None, "unknown", str(error)
    if rows is not None:
        return rows, "data", None
    number_match = None if spec.fixture else re.match(r"\d+", str(stated or ""))
    if number_match is None:
        return None, "unknown", f"the number of samples of {spec.dataset} is known only from its data"
    return int(number_match[0]), "documented", None


# ---------------------------------------------------------------------- samples
def index_of(cluster: str, count: int) -> int:
    """Return the shard (0 to `count` - 1) of a cluster's samples, whatever the limit and the order of samples.

    cluster: image, document, video or page of the samples.
    """
    return int.from_bytes(hashlib.sha256(cluster.encode()).digest()[:8], "big") % count


def longest_first(costs: Mapping[str, float]) -> list[str]:
    """Return names by falling cost, equal costs by name."""
    return sorted(costs, key=lambda name: (-costs[name], name))


def select_samples(refs: Sequence[SampleRef], selection: Selection) -> list[SampleRef]:
    """Return the samples that are in a selection: in its shard, and among its ids if it has any."""
    chosen_ids, (shard_index, number_of_shards) = selection.samples, parse_shard(selection.shard)
    return [
        ref
        for ref in refs
        if (chosen_ids is None or ref.sample_id in chosen_ids)
        and index_of(ref.cluster, number_of_shards) == shard_index
    ]


def with_limit_for_ids(selection: Selection, specs: Mapping[str, TaskSpec]) -> Selection:
    """Return a selection with the smallest limit that includes its sample ids, with all questions of their documents.

    A selection without ids is returned unchanged. Datasets other than pages are opened.

    specs: dataset label -> task.

    Raises ConfigError: a sample is in none of the datasets, or a dataset has none of the samples.
    """
    if selection.samples is None:
        return selection
    from mmkv_bench.evaluation.documents import sample_refs

    wanted_ids, known_ids, new_limit = selection.samples, set[str](), 0
    for label, spec in specs.items():
        refs = sample_refs(spec, None)
        named_refs = [ref for ref in refs if ref.sample_id in wanted_ids]
        if not named_refs:
            shown_ids = ",".join(wanted_ids[:3]) + ",..." * (len(wanted_ids) > 3)
            raise ConfigError(
                f"samples=[{shown_ids}]: {label} has none of these, {_similar_ids_text(wanted_ids[0], refs)}; give one of its "
                "samples, or leave the "
                "dataset out"
            )
        known_ids |= {ref.sample_id for ref in named_refs}
        last_doc = max(ref.doc_id for ref in named_refs)
        while spec.questions_key and last_doc + 1 < len(refs) and refs[last_doc + 1].cluster == refs[last_doc].cluster:
            last_doc += 1  # the other questions of its document
        new_limit = max(new_limit, last_doc)
    unknown_ids = [name for name in wanted_ids if name not in known_ids]
    if unknown_ids:
        all_refs = [ref for spec in specs.values() for ref in sample_refs(spec, None)]
        raise ConfigError(
            f"samples: {unknown_ids[0]!r} is in no dataset of this run; {_similar_ids_text(unknown_ids[0], all_refs)}"
        )
    return replace(selection, limit=new_limit + 1)


def _similar_ids_text(name: str, refs: Sequence[SampleRef]) -> str:
    similar_ids = get_close_matches(name, [ref.sample_id for ref in refs], n=3, cutoff=0.6)
    if similar_ids:
        return f"did you mean {' or '.join(map(repr, similar_ids))}?"
    return f"its ids go from {refs[0].sample_id!r} to {refs[-1].sample_id!r}"
