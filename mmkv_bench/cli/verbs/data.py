"""`mmkv-bench data` lists and checks datasets; `mmkv-bench tokens` counts visual tokens. Nothing is downloaded."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.files import MODEL, content, options
from mmkv_bench.config.names import canonical, chosen
from mmkv_bench.config.schema import Model
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    from mmkv_bench.evaluation.data_check import DataReport
    from mmkv_bench.families.base import PixelLimits

_KEYS = ("model", "model.frames", "model.min_pixels", "model.max_pixels", "model.video_max_pixels")


def data(given: argparse.Namespace) -> int:
    """List datasets, or check whether their data exist. Return 0 if all are ready, else 2."""
    if given.what == "check":
        return _check(given.names, given.json, given.online)
    if given.names:
        raise ConfigError(
            f"list takes no names, but got {given.names[0]!r}; to check one dataset, write mmkv-bench data check <name>"
        )
    from mmkv_bench.datasets import fixtures

    fixture_names = fixtures.names()
    rows: list[dict[str, Any]] = []
    for name in options("dataset"):
        about = content("dataset", name).get("about") or {}
        descriptions = {"size": about.get("size") or "", "judge": about.get("judge") or "none"}
        row = {
            "dataset": name,
            "samples": about.get("samples"),
            **{key: str(text) for key, text in descriptions.items()},
        }
        rows.append(row | {"fixture": name in fixture_names, "title": str(about.get("title") or "")})
    if given.json:
        print(json.dumps(rows))
        return 0
    width = max(len(row["dataset"]) for row in rows)
    print(f"{'dataset':{width}}  samples  judge     fixture  what")
    for row in rows:
        fixture, samples = "yes" if row["fixture"] else "-", row["samples"] or "-"
        print(f"{row['dataset']:{width}}  {samples!s:>7}  {row['judge']:8}  {fixture:7}  {row['title']}")
    return 0


def _check(words: Sequence[str], as_json: bool, online: bool) -> int:
    dataset_names = [name for word in words if "=" not in word for name in chosen("dataset", word)]
    known_datasets = options("dataset")
    if unknown := [name for name in dataset_names if name not in known_datasets]:
        raise ConfigError(f"unknown dataset {unknown[0]!r}; {nearest(unknown[0], known_datasets)}")
    if not dataset_names:
        raise ConfigError(f"check needs the name of a dataset; allowed: {', '.join(known_datasets)}; give one")
    from mmkv_bench.config.compose import compose
    from mmkv_bench.datasets import fixtures
    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.evaluation.data_check import check, repository_of
    from mmkv_bench.evaluation.environment import go_offline

    config = compose([f"dataset=[{','.join(dict.fromkeys(dataset_names))}]", *(word for word in words if "=" in word)])
    if not online:
        go_offline()
    reports_as_data = []
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), dict(node), vars(config.data))
        about = node.get("about") or {}
        report = check(spec, about)
        document = {
            "dataset": spec.dataset,
            "task": spec.name,
            "ready": report.ready,
            "title": about.get("title"),
            "source": about.get("hub"),
            "licence": about.get("licence"),
            "expected_size": about.get("size"),
            "expected_samples": about.get("samples"),
            "judge": about.get("judge", "none"),
            "fixture": str(name) in fixtures.names(),
            "columns_read": list(spec.columns),
            **vars(report),
        }
        if online and (repository := repository_of(spec)) is not None:
            from mmkv_bench.datasets.sources import ask

            document["hub"] = ask(repository) | {"repository": repository}
        reports_as_data.append(document)
        if not as_json:
            print("\n".join(_report(document, report)))
    if as_json:
        print(json.dumps(reports_as_data))
    return 0 if all(document["ready"] for document in reports_as_data) else 2


def _report(document: Mapping[str, Any], report: DataReport) -> list[str]:
    expected_samples = document["expected_samples"]
    amounts = [
        f"{report.files} file{'s' * (report.files != 1)}" if report.files is not None else "",
        _bytes(report.bytes) if report.bytes is not None else "",
        f"{report.rows} rows" if report.rows is not None else "",
    ]
    lines = [
        f"{document['dataset']}: {document['title'] or document['task']}",
        f"  task      {document['task']}{', ' + report.config if report.config else ''}",
        f"  source    {document['source'] or 'as its task says'}",
        f"  licence   {document['licence'] or 'not known here'}",
        "  size      "
        f"{document['expected_size'] or 'not known here'}{f'; {expected_samples} samples' if expected_samples else ''}",
        f"  judge     {document['judge']}",
        f"  here      {report.place}" + (f" ({', '.join(filter(None, amounts))})" if any(amounts) else ""),
    ]
    if report.columns is not None:
        unread = [name for name in report.columns if name not in document["columns_read"]]
        read_columns = ", ".join(name for name in document["columns_read"] if name in report.columns) or "not declared"
        lines.append(f"  columns   read: {read_columns}{'; further: ' + ', '.join(unread) if unread else ''}")
    if report.media is not None:
        lines.append(f"  videos    {report.media}")
    if hub := document.get("hub"):
        lines.append(f"  hub       {hub.get('error') or _hub(hub)}")
    lines += [f"  note      {note}" for note in report.notes]
    lines += [f"  missing   {problem}" for problem in report.missing]
    if report.missing and document["fixture"]:
        lines.append("  trial     data=fixture takes small data of our own making in the same schema")
    return [*lines, f"  {'ready' if report.ready else 'not ready'}"]


def _hub(hub: Mapping[str, Any]) -> str:
    version = f"{hub['repository']} at {str(hub['commit'])[:12]} of {hub['changed']}"
    licence = f"licence {hub['licence'] or 'none stated'}" + ", gated" * bool(hub["gated"])
    return f"{version}: {hub['files']} files, {_bytes(hub['bytes'])}, {licence}"


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


# ---------------------------------------------------------------------- tokens
def tokens(given: argparse.Namespace) -> int:
    """Print the visual tokens of images, and the bytes of their KV cache, per size and in sum. Return 0.

    Raises ConfigError: words that are neither sizes nor settings, a model without a processor, limits without effect.
    """
    from mmkv_bench.config.compose import compose
    from mmkv_bench.families.base import PixelLimits
    from mmkv_bench.families.facts import kv_bytes_per_token
    from mmkv_bench.families.registry import image_tokens, video_tokens
    from mmkv_bench.models.shape import config_of

    words_and_settings = [f"model={word}" if canonical(MODEL, word) in options(MODEL) else word for word in given.words]
    settings = [word for word in words_and_settings if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", word)]
    image_sizes = [
        (int(word.partition("x")[0]), int(word.partition("x")[2]))
        for word in words_and_settings
        if word not in settings
    ]
    for word in settings:
        if word.partition("=")[0] not in _KEYS:
            suggestion = nearest(word.partition("=")[0], _KEYS)
            raise ConfigError(f"{word!r} is neither a size such as 1344x896 nor a key; {suggestion}")
    if not image_sizes or not any(word.startswith("model=") for word in settings):
        raise ConfigError("tokens needs a model and a size; write for example model=qwen2_5_vl_7b 1344x896")
    model = compose(settings).model
    shape, processor = model.shape, model.processor
    if not shape or not processor:
        raise ConfigError(
            f"model={model.name} has no processor settings in conf/model; choose a model with such settings, for "
            "example qwen2_5_vl_7b"
        )
    model_type = str(shape["model_type"])
    limits = PixelLimits(model.min_pixels, model.max_pixels, model.video_max_pixels)
    _check_limits(model, model_type, processor, limits)
    per_token, tokens_per_size = kv_bytes_per_token(config_of(shape), model.dtype), []
    print(f"{model.name}: {per_token / 1024:g} KiB of keys and values per token in {model.dtype}")
    for size in image_sizes:
        if model.frames is None:
            medium, token_count = "image", image_tokens(model_type, processor, *size, len(image_sizes), limits)
        else:
            medium = f"{model.frames} frames of"
            token_count = video_tokens(model_type, processor, model.frames, *size, limits)
        tokens_per_size.append(token_count)
        print(f"  {medium} {size[0]}x{size[1]}: {_tokens(token_count, per_token)}")
    if len(image_sizes) > 1:
        print(f"  together: {_tokens(sum(tokens_per_size), per_token)}")
    return 0


def _tokens(count: int, per_token: int) -> str:
    nbytes = count * per_token
    cache_size = f"{nbytes / 2**20:,.1f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:,.2f} GiB"
    return f"{count:,} visual tokens, {cache_size}"


def _check_limits(model: Model, kind: str, processor: Mapping[str, Any], limits: PixelLimits) -> None:
    """Refuse pixel limits that a run refuses, and limits without effect. kind: the model's type."""
    from mmkv_bench.families.qwen_vl import area
    from mmkv_bench.families.registry import family

    for key, value in {"frames": model.frames, **vars(limits)}.items():
        if value is not None and value < 1:
            raise ConfigError(f"model.{key}={value} is not a whole number >= 1; give such a number")
    given_limits = [key for key, value in vars(limits).items() if value is not None]
    if given_limits and not family(kind).pixel_limits:
        raise ConfigError(
            f"{', '.join(given_limits)}: model={model.name} scales to fixed sizes, and only Qwen-VL has pixel limits; "
            "leave the limits out"
        )
    unused_limits = [key for key in given_limits if (key == "video_max_pixels") == (model.frames is None)]
    if unused_limits:
        medium = "images" if model.frames is None else "videos"
        raise ConfigError(f"{', '.join(unused_limits)} has no effect on {medium}; leave it out")
    if given_limits and model.frames is None:
        min_area, max_area = area(processor["image"])
        min_area, max_area = limits.min_pixels or min_area, limits.max_pixels or max_area
        if min_area > max_area:
            raise ConfigError(
                f"at least {min_area} and at most {max_area} pixels contradict each other; give model.min_pixels and "
                "model.max_pixels"
            )
