"""A task's documents, loaded once per process and dataset, for generation and for the scoring of every cell."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench import consent
from mmkv_bench.datasets import local_data, page_data, sources
from mmkv_bench.datasets.drawn_page_tasks import DEFAULT_COUNT
from mmkv_bench.datasets.specs import GENERATION_DEFAULTS, TaskSpec, limited
from mmkv_bench.datasets.task_yaml import lmms_eval_folder, plain_config, task_file
from mmkv_bench.errors import ConfigError, MissingDataError, UnsupportedError, nearest
from mmkv_bench.evaluation.environment import go_offline, lmms_eval, task_environment, task_errors
from mmkv_bench.evaluation.extra_metrics import NAMES as MEASURES
from mmkv_bench.evaluation.question_groups import check_order
from mmkv_bench.evaluation.samples import SampleRef
from mmkv_bench.evaluation.task_code import OpenedFiles, opened
from mmkv_bench.evaluation.task_scorer import BESIDE
from mmkv_bench.file_state import cache_dir, digest_of

if TYPE_CHECKING:
    import datasets


def media_columns(docs: datasets.Dataset) -> list[str]:
    """Return the names of the columns that contain pictures, sound or videos, or lists of these."""
    from datasets import Audio, Image, Video

    return [
        name
        for name, feature in docs.features.items()
        if isinstance(getattr(feature, "feature", feature), Image | Audio | Video)
    ]


def paths_without_bytes(column: Any) -> set[str]:
    """Return the paths of media whose bytes are not in the column itself.

    column: undecoded Arrow column of media (structs with `bytes` and `path`), or of lists of media.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        column = pc.list_flatten(column)
    content, paths = (pc.struct_field(column, name) for name in ("bytes", "path"))
    return set(paths.filter(content.is_null()).drop_null().to_pylist())


SAMPLING = ("temperature", "top_p", "top_k")  # keys of a task's YAML that mean nothing for greedy decoding


@dataclass
class Documents:
    """The first `len(refs)` documents of a task.

    full            split -> documents with media
    bare            split -> documents as scorers get them: without image columns, unless the task asks for them
    split           the evaluated split
    refs            the samples in order
    prompt_hashes   pages: doc_id to prompt hash; empty for other tasks (see fingerprints.py)
    digest          digest of the evaluated split's rows, once computed
    source          digest of the local files that the rows were read from
    """

    full: Mapping[str, datasets.Dataset]
    bare: Mapping[str, datasets.Dataset]
    split: str
    refs: list[SampleRef]
    prompt_hashes: dict[int, str] = field(default_factory=dict)
    digest: str | None = None
    source: str = ""


READ_AT_IMPORT: dict[Path, OpenedFiles] = {}
"""Files that a task's code opened while it was imported, by the path of the task's YAML."""
_LOADED: dict[tuple[str, int | None], Documents] = {}


def documents(spec: TaskSpec, limit: int | None) -> Documents:
    """Return the task's documents, at most `limit` (None: all). Each set is loaded once per process.

    Raises:
        ConfigError, UnsupportedError, DataError: the documents cannot be loaded; the message names the task.
    """
    count = limited(spec, limit)
    key = (spec.key(), count)
    if key not in _LOADED:
        _LOADED[key] = _pages(spec, count or DEFAULT_COUNT) if spec.is_pages else _fetch(spec, count)
    return _LOADED[key]


def sample_refs(spec: TaskSpec, limit: int | None) -> list[SampleRef]:
    """Return references to the first `limit` samples, without decoding an image or drawing a page."""
    if spec.is_pages:
        return _page_refs(spec, limited(spec, limit) or DEFAULT_COUNT)
    return documents(spec, limit).refs


def _page_refs(spec: TaskSpec, count: int) -> list[SampleRef]:
    """Return references to the samples of a page dataset. Each question has a page, and so a cluster, of its own."""
    samples = page_data.named(spec.name, spec.split or "test", count)
    return [SampleRef(number, name, name, kind) for number, (name, kind) in enumerate(samples)]


def task_config(spec: TaskSpec) -> dict[str, Any]:
    """Return lmms-eval's configuration of the task, with the data source and split of `spec`.

    Each call loads the configuration anew, because scorers keep state in their modules.
    """
    path = task_file(spec)
    if spec.include_path:
        consent.require(path.parent, None)
    source = sources.source(spec, path)
    module = lmms_eval(spec.offline)
    with module.quiet(), task_errors(spec.name, code=True), task_environment(spec.media_root), opened() as heard:
        config = module.load_config(path)
    if not path.resolve().is_relative_to(lmms_eval_folder().resolve()):
        READ_AT_IMPORT[path] = heard
    if config.get("class") is not None:
        raise UnsupportedError(
            f"task {spec.name} is a Python class of lmms-eval; allowed: tasks defined by YAML; choose such a task"
        )
    output_type, repeats = config.get("output_type", "generate_until"), config.get("repeats", 1)
    if output_type != "generate_until" or repeats != 1:
        raise UnsupportedError(
            f"task {spec.name} has output_type={output_type}, repeats={repeats}; allowed: output_type=generate_until "
            "with repeats=1, one answer per question; choose such a task"
        )
    metrics = [str(entry["metric"]) for entry in config.get("metric_list") or []]
    for metric in spec.metrics if metrics else ():  # nobody would notice a missing headline metric
        metric_name = metric.partition(",")[0]  # without the name of the filter
        if metric_name not in (*metrics, *BESIDE, *MEASURES):
            raise ConfigError(
                f"datasets.{spec.dataset}.metrics names {metric!r}, but task {spec.name} has no such metric; "
                f"{nearest(metric_name, [*metrics, *MEASURES])}"
            )
    config |= {"task": spec.name} | source
    if spec.split and not spec.is_pages:
        config |= {"test_split": spec.split, "validation_split": None}
    return config


def generation_settings(spec: TaskSpec) -> dict[str, Any]:
    """Return the generation settings of a task: the defaults, then the task's YAML, then the configuration (the last
    wins).

    Decoding is greedy unless the configuration says otherwise: some YAMLs set a temperature with do_sample off.
    """
    if spec.is_pages:  # this package's YAMLs agree with the configuration
        return GENERATION_DEFAULTS | dict(spec.generation)
    config = plain_config(task_file(spec))
    settings = dict(config.get("generation_kwargs") or {})
    settings |= (config.get("model_specific_generation_kwargs") or {}).get("default") or {}
    return greedy(settings) | dict(spec.generation)


def greedy(task_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task's generation settings made greedy, with defaults filled in, and `until` as a list."""
    settings = {name: value for name, value in task_settings.items() if name not in SAMPLING} | {"do_sample": False}
    stop_texts = settings.get("until") or []
    settings["until"] = [stop_texts] if isinstance(stop_texts, str) else list(stop_texts)
    return GENERATION_DEFAULTS | settings


def _pages(spec: TaskSpec, count: int) -> Documents:
    import datasets

    task_data = page_data.load(spec.name, spec.split or "test", count)
    rows_without_images = datasets.Dataset.from_dict(
        task_data.remove_columns("images").to_dict()
    )  # in memory, as each cell reads it
    refs = _page_refs(spec, count)
    hashes = dict(enumerate(rows_without_images["prompt_hash"]))
    return Documents({"test": task_data}, {"test": rows_without_images}, "test", refs, hashes)


def _fetch(spec: TaskSpec, count: int | None) -> Documents:
    from_hub = sources.require_upstream(spec, task_file(spec))
    content_digest = _content(spec)
    config = task_config(spec)
    module, read_data = lmms_eval(spec.offline), sources.reads_itself(config)
    if spec.offline and from_hub and not go_offline():
        raise ConfigError(
            f"task {spec.name} must stay offline (offline=true), but huggingface_hub was already imported online; "
            "set HF_HUB_OFFLINE=1 in the environment to use the hub cache, or give offline=false"
        )
    with (
        task_errors(spec.name, folder=spec.dataset_path),
        task_environment(spec.media_root),
        module.quiet(),
        _without_dataset_cache(spec),
    ):
        if read_data:
            rows_with_media = read_data(Path(config["dataset_path"]), config)
            _require_split(spec, str(config.get("test_split") or config.get("validation_split")), rows_with_media)
            rows_without_media = {
                name: docs.remove_columns(media_columns(docs)) for name, docs in rows_with_media.items()
            }
            task = module.GivenTask(config, rows_with_media, rows_without_media)
        else:
            # `datasets` names converted data by the files' paths and modification times, and would return old rows if new content
            # has the same. So it works in a folder named by the files' bytes.
            files = sources.data_files(spec)
            digest = digest_of((str(number), file) for number, file in enumerate(files))[:16]
            conversion_folder = conversions() / f"content-{digest}" if files else None
            task = module.FetchedTask(_declare_pictures(spec, config), spec.offline, conversion_folder)
    split = task.config.test_split or task.config.validation_split
    _require_split(spec, split, task.dataset)
    local_data.require_columns(spec.dataset, spec.columns, task.dataset[split].column_names)
    total = len(task.dataset[split])
    refs = _refs(spec, task.dataset[split], range(min(total, count or total)))
    if spec.questions_key:
        check_order(spec, task.dataset[split], refs)
    return Documents(task.dataset, task.dataset_no_image, split, refs, source=content_digest)


def conversions() -> Path:
    """Return the folder below which `datasets` writes its conversions of local files."""
    cache_folder = os.environ.get("HF_DATASETS_CACHE")
    return Path(cache_folder) if cache_folder else cache_dir() / "datasets"


@contextmanager
def _without_dataset_cache(spec: TaskSpec) -> Iterator[None]:
    """Context manager in which `datasets` writes no cache files into a user's folder made by `save_to_disk`."""
    import datasets

    is_saved_folder = spec.dataset_path and (Path(spec.dataset_path).expanduser() / local_data.SAVED).is_file()
    if not (is_saved_folder and datasets.is_caching_enabled()):
        yield
        return
    datasets.disable_caching()
    try:
        yield
    finally:
        datasets.enable_caching()


def changed(spec: TaskSpec) -> bool:
    """Return True if the files of already loaded documents have other content now."""
    return any(docs.source != _content(spec) for key, docs in _LOADED.items() if key[0] == spec.key())


def forget_changed(spec: TaskSpec) -> None:
    """Drop the loaded documents of a task if their files have other content now."""
    for key in [key for key in _LOADED if key[0] == spec.key()]:
        if _LOADED[key].source != _content(spec):
            del _LOADED[key]


def _content(spec: TaskSpec) -> str:
    """Return a digest of the local files from which rows are read; "" if there are none."""
    files = sources.data_files(spec)
    return digest_of((str(file), file) for file in files) if files else ""


def _declare_pictures(spec: TaskSpec, config: dict[str, Any]) -> dict[str, Any]:
    """Return a task's configuration that declares the picture columns of local parquet files.

    `datasets` then decodes them. A dataset without known columns keeps its configuration, because other tasks of
    lmms-eval need the plain bytes.
    """
    if not spec.dataset_path or not spec.columns or config["dataset_path"] != "parquet":
        return config
    kwargs = config["dataset_kwargs"]
    features = local_data.picture_features([file for part in kwargs["data_files"].values() for file in part])
    return config | {"dataset_kwargs": kwargs | {"features": features}} if features else config


def _require_split(spec: TaskSpec, split: str, splits: Mapping[str, Any]) -> None:
    if split not in splits:
        raise MissingDataError(
            f"the data of {spec.dataset} have no split {split!r}; allowed: {', '.join(splits)}; give one of these "
            "with datasets.<name>.split=..."
        )


def _refs(spec: TaskSpec, docs: datasets.Dataset, doc_ids: range) -> list[SampleRef]:
    """Return references to the samples `doc_ids`. A sample's cluster is the value of `cluster_key`, else a digest of
    its undecoded media, else its id."""
    key_names = {name: getattr(spec, name) for name in ("cluster_key", "context_key", "questions_key")}
    for key, name in key_names.items():
        if name is not None and name not in docs.column_names:
            raise MissingDataError(
                f"datasets.{spec.dataset}.{key}={name!r} is not a field of task {spec.name}; allowed: "
                f"{', '.join(docs.column_names)}"
            )
    columns = [spec.cluster_key] if spec.cluster_key else media_columns(docs)
    key_columns = docs.select_columns(columns).with_format("arrow") if columns else None
    refs = []
    for doc_id in doc_ids:
        sample_id = spec.sample_id(doc_id)
        cluster = sample_id
        if key_columns is not None:
            row = {name: column[0].as_py() for name, column in zip(columns, key_columns[doc_id].columns, strict=True)}
            if spec.cluster_key is None:
                cluster = _digest(row) or sample_id
            elif len(cluster := str(row[spec.cluster_key])) > 64:  # long data, such as an image as base64 text
                cluster = hashlib.sha256(cluster.encode()).hexdigest()[:16]
        refs.append(SampleRef(doc_id, sample_id, cluster, None))
    return refs


def _digest(row: Mapping[str, Any]) -> str | None:
    """Return a digest of the bytes or paths of a row's media; None for a row without media."""
    if not any(row.values()):
        return None
    digest = hashlib.sha256()
    values_left: list[Any] = list(row.values())
    while values_left:
        value = values_left.pop()
        if isinstance(value, dict):
            values_left += [value.get("bytes") or value.get("path")]
        elif isinstance(value, list):
            values_left += value
        else:
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
    return digest.hexdigest()[:16]
