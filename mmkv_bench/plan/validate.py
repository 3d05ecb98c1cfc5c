"""Checks that refuse what a run cannot do, before any work and without a loaded model.

A message says what was given, what is allowed, and what to do.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv_bench import devices, protocols
from mmkv_bench.config import schema
from mmkv_bench.config.files import options
from mmkv_bench.config.overrides import same_kind
from mmkv_bench.config.schema import AnswerConfig, Data, Gate, Model, RunConfig, allowed, as_list
from mmkv_bench.config.shorthand import CUSTOM
from mmkv_bench.devices.requirements import COMPILED, FLASH, check_compiler, check_flash_attn
from mmkv_bench.errors import ConfigError, UnsupportedError, nearest
from mmkv_bench.judging.answers import check_judge
from mmkv_bench.methods import method_file_checks
from mmkv_bench.methods.build import FULL
from mmkv_bench.methods.node import flat_parameters
from mmkv_bench.methods.part_rules import visual_parts

if TYPE_CHECKING:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.datasets.specs import TaskSpec
    from mmkv_bench.families.facts import ModelFacts

Nodes = Mapping[str, Mapping[str, Any]]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]*")


def validate(config: RunConfig) -> None:
    """Check a composed configuration without torch and without weights. Raises ConfigError for the first mistake."""
    from mmkv_bench.compression.budget import Budget, StateCost
    from mmkv_bench.store.store_notes import PrimaryEndpoint

    _check_values(config)
    parse_shard(config.shard)
    for value in _values("budget", config.budget):
        Budget.parse(value, StateCost(entry=1))  # the plan converts bytes to entries
    for key in ("fork_memory", "memory_limit"):
        bytes_of(getattr(config, key), key)
    if not config.datasets:
        raise ConfigError(f"no dataset is chosen; allowed: {', '.join(options('dataset'))}; write dataset=<name>")
    _methods(config.methods, config.variants)
    _variants(config.methods, config.variants, config.folders)
    _model(config.model)
    check_judge(config.judge)
    _gate(config.gate, config.datasets, config.data)
    _out(config.out)
    if config.primary is not None:
        Budget.parse(PrimaryEndpoint.parse(config.primary).budget)


def compose_checked(overrides: Sequence[str]) -> RunConfig:
    """Compose and check a configuration. Raises the errors of `compose` and `validate`."""
    from mmkv_bench.config.compose import compose

    config = compose(overrides)
    validate(config)
    return config


def compose_checked_jobs(overrides: Sequence[str]) -> list[tuple[list[str], RunConfig]]:
    """Return (overrides, checked configuration) of each job of a sweep. Raises ConfigError if a job cannot run."""
    from mmkv_bench.config.compose import expand_sweep

    configs, jobs = [], expand_sweep(overrides)
    for job in jobs:
        try:
            configs.append((job, compose_checked(job)))
        except ConfigError as error:
            raise ConfigError(f"job {' '.join(job) or '(defaults)'} of {len(jobs)}: {error}") from error
    return configs


def validate_variants(variants: Nodes, folders: tuple[str, ...], defaults: Nodes) -> None:
    """Check the names, parameters and value types of variants (methods with changed parameters). Raises ConfigError.

    Args:
        variants: name -> changes.
        folders: further config folders.
        defaults: name -> method settings without overrides.
    """
    for name, changes in variants.items():
        base_name = str(changes["base"])
        if name != base_name and name in options("method", folders):
            raise ConfigError(
                f"variants.{name} has the name of a method but is based on {base_name}, so tables would confuse the "
                "two; give the "
                f"variant another name, such as variants.my_{name}={{base: {base_name}, ...}}"
            )
        default_by_key = {**flat_parameters(defaults[base_name]), "reading": None, "decoding": None}
        for key, value in changes.items():
            if key == "base":
                continue
            if key not in default_by_key:
                raise ConfigError(
                    f"variants.{name}: {base_name} has no parameter {key!r}; {nearest(key, default_by_key)}"
                )
            if not same_kind(value, default_by_key[key], key):
                raise ConfigError(
                    f"variants.{name}.{key}={value} has another type than its default {default_by_key[key]!r}; give a "
                    "value of that type"
                )


def validate_decoding(family: ModelFacts, answering: AnswerConfig) -> None:
    """Raise UnsupportedError if the kernels do not support the model's sliding windows, recurrent states or sinks."""
    if family.sinks and answering.model.attention != "eager":
        raise UnsupportedError(
            f"model.attention={answering.model.attention}: {family.name} has learned sinks, which only eager attention "
            "supports; allowed for it: model.attention=eager"
        )
    given_settings = {"decode": answering.decode, "model.attention": answering.model.attention}
    for key, value in given_settings.items():
        if family.states.layers and value in (COMPILED, FLASH):
            raise UnsupportedError(
                f"{key}={value}: {family.name} has layers that keep a window or a recurrent state; allowed for it: "
                "decode=eager, model.attention=sdpa or eager"
            )


def validate_combinations(
    names: Sequence[str], family: ModelFacts, compressors: Iterable[Compressor], uncut: Sequence[str]
) -> None:
    """Refuse methods and protocols that a model cannot run, such as a method that needs visual tokens. Raises
    UnsupportedError.

    names: names of protocols.
    compressors: the methods.
    uncut: datasets without `context_key`, whose prompts cannot be cut after a document.
    """
    compressors = list(compressors)
    for name, compressor in product(names, compressors):
        rule = protocols.protocol(name)
        if rule.prefills_again:
            compressor.check_only_evicts(name)
        if family.states.layers:
            compressor.check_beside_states(family.name, rule, family.states.full_readers > 0)
        if rule.converses:
            from mmkv_bench.compression.streaming import check_turns

            check_turns(compressor)
        elif rule.needs_questions:
            compressor.check_no_answer(name)
    for compressor in compressors:
        if compressor.scorer is not None:
            compressor.scorer.check_layers(family.num_layers)
        if compressor.resamples and compressor.needs_visual and family.multimodal:
            from mmkv_bench.families.registry import check_smaller

            check_smaller(family.rules)
    if family.multimodal:
        return
    cutting_protocols = [name for name in names if name in protocols.CUTTING]
    if cutting_protocols and uncut:
        raise UnsupportedError(
            f"protocol={cutting_protocols[0]} cuts a prompt after its visual tokens, but {family.name} has none; allowed for "
            f"{uncut[0]}: {', '.join(protocols.WHOLE)}; choose one of these protocols or a multimodal model, or name the "
            f"document's field with datasets.{uncut[0]}.context_key"
        )
    visual_methods = [c.name for c in compressors if c.needs_visual or visual_parts(c)]
    if visual_methods:
        raise UnsupportedError(
            f"method {', '.join(dict.fromkeys(visual_methods))} needs visual tokens, but {family.name} has none; choose another "
            "method or a multimodal model"
        )


def validate_questions(names: Sequence[str], specs: Mapping[str, TaskSpec], answering: AnswerConfig) -> None:
    """Refuse protocols that do not fit a dataset or the settings of answers. Raises ConfigError.

    Such protocols need several questions per document, or measure only answers, or decode eagerly.

    names: names of protocols.
    specs: dataset -> task.
    """
    question_protocols = [name for name in names if protocols.protocol(name).needs_questions]
    single_question_datasets = [name for name, spec in specs.items() if not spec.questions_key]
    if question_protocols and single_question_datasets:
        raise ConfigError(
            f"protocol={question_protocols[0]} needs several questions per document, but "
            f"{single_question_datasets[0]} has one; choose "
            f"dataset=questions_records, or protocol={' or '.join(protocols.SINGLE)}"
        )
    if question_protocols and not answering.shares_prefill:
        raise ConfigError(
            f"protocol={question_protocols[0]} asks the questions of a document together, but sharing=off asks "
            "each alone; write sharing=on"
        )
    separate_prefill_protocols = [name for name in names if protocols.protocol(name).apart]
    measured_datasets = [name for name, spec in specs.items() if spec.measures]
    if separate_prefill_protocols and measured_datasets:
        raise ConfigError(
            f"protocol={separate_prefill_protocols[0]} measures only answers, but {measured_datasets[0]} has measures="
            f"[{','.join(specs[measured_datasets[0]].measures)}]; leave the protocol out, or give "
            f"datasets.{measured_datasets[0]}.measures=[]"
        )
    conversing_protocols = [name for name in names if protocols.protocol(name).converses]
    if conversing_protocols and answering.decode != "eager":
        raise ConfigError(
            f"protocol={conversing_protocols[0]} decodes eagerly, but decode={answering.decode} is set; write decode=eager"
        )


def validate_stream(
    decode: str,
    streamed: Sequence[tuple[Compressor, Budget | None]],
    family: ModelFacts | None,
    uncut: Sequence[str],
) -> None:
    """Refuse what protocol=stream cannot run.

    Args:
        decode: how tokens are decoded (`decode` of the configuration).
        streamed: (compressor, budget) of each cell under this protocol.
        family: facts about the model; None if unknown.
        uncut: datasets without `context_key`, whose streams are pictures or videos.

    Raises:
        ConfigError, UnsupportedError: see `streaming.check_streams`; or the model has windows or recurrent states, or
            does not read videos in chunks, or `decode` is not eager.
    """
    if not streamed:
        return
    from mmkv_bench.compression.streaming import check_streams
    from mmkv_bench.families.registry import check_chunks, check_no_states

    for compressor, budget in streamed:
        check_streams(compressor, budget)
    if family is not None:
        check_no_states(family.rules, bool(family.states.layers))
    if family is not None and family.multimodal and uncut:
        check_chunks(family.rules)
    if decode != "eager":
        raise ConfigError(f"protocol=stream decodes eagerly, but decode={decode} is set; write decode=eager")


def parse_shard(text: str) -> tuple[int, int]:
    """Parse the text `i/n` to (i, n). Raises ConfigError unless 0 <= i < n."""
    shard_match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if not shard_match or int(shard_match[1]) >= int(shard_match[2]):
        raise ConfigError(
            f"shard={text} is not a part of a run; allowed: i/n with 0 <= i < n (0/4, 1/4, 2/4, 3/4); give one such part"
        )
    return int(shard_match[1]), int(shard_match[2])


def bytes_of(value: Any, key: str = "fork_memory") -> int | None:
    """Convert an amount of memory to bytes: a whole number, text with a unit (`512MiB`), or None for no limit.

    key: name of the setting, for the error message.
    """
    if value is None:
        return None
    from mmkv_bench.compression.budget import UNITS

    amount_match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    number_of_bytes = (
        int(float(amount_match[1]) * {"": 1, **UNITS}.get(amount_match[2].lower(), 0)) if amount_match else 0
    )
    if number_of_bytes < 1:
        raise ConfigError(f"{key}={value} is not an amount of memory; allowed: {allowed(key)}; give such an amount")
    return number_of_bytes


def _check_values(config: RunConfig) -> None:
    """Check all settings that have a list of allowed words or a range of numbers. Raises ConfigError."""
    from mmkv_bench.compression.budget import LARGEST

    for key, words in schema.words().items():
        value = attrgetter(key)(config)
        for one in value if isinstance(value, tuple) else [value]:
            _one_of(key, one, words)
        if key != "retry":
            _values(key, value)
    if config.samples is not None:
        sample_ids = list(config.samples)
        if not sample_ids or not all(isinstance(name, str) and name for name in sample_ids):
            raise ConfigError(
                f"samples={sample_ids} is not a list of sample ids; allowed: {allowed('samples')}; give ids, or null"
            )

    for key, (kind, least, inclusive, optional) in schema.ranges().items():
        for number in _values(key, attrgetter(key)(config)):
            if (number is None and optional) or (key == "batch" and number == schema.MAX):
                continue
            is_of_kind = not isinstance(number, bool) and isinstance(number, int if kind is int else (int, float))
            is_too_large = is_of_kind and kind is int and number > LARGEST
            if not is_of_kind or is_too_large or not (number >= least if inclusive else number > least):
                maximum_clause = f", at most {LARGEST}" if is_too_large else ""
                raise ConfigError(
                    f"{key}={number} is out of range; allowed: {allowed(key)}{maximum_clause}; give a number in this range"
                )
    _stream(config.stream, config.protocol)
    min_pixels, max_pixels = config.model.min_pixels, config.model.max_pixels
    if min_pixels is not None and max_pixels is not None and min_pixels > max_pixels:
        raise ConfigError(
            f"model.min_pixels={min_pixels} is above model.max_pixels={max_pixels}; give min_pixels <= max_pixels"
        )


def _stream(given: schema.Stream, names: Sequence[str]) -> None:
    """Check the settings of protocol=stream. Without this protocol among `names`, they must have their defaults."""
    shares_above_one = [share for share in given.ask_at if share > 1]
    if shares_above_one:
        raise ConfigError(
            f"stream.ask_at={shares_above_one[0]} is beyond the end of the stream; allowed: {allowed('stream.ask_at')}; give a "
            "smaller share"
        )
    if given.every is None and given.ask_at != schema.Stream().ask_at:
        raise ConfigError(
            f"stream.ask_at={_override_text(given.ask_at)} asks after a chunk, but stream.every=null reads all at once; give "
            "stream.every=<a number of frames or tokens>, or stream.ask_at=1"
        )
    for key, usual in vars(schema.Stream()).items():
        value = getattr(given, key)
        if value != usual and not any(protocols.protocol(name).streams for name in names):
            raise ConfigError(
                f"stream.{key}={_override_text(value)} is a setting of protocol=stream, but this run has "
                f"protocol={','.join(names)}; "
                f"add protocol=stream, or give stream.{key}={_override_text(usual)}"
            )


def _override_text(value: Any) -> str:
    """Return a value as the user would write it: `0.5`, `[0.5,1]`, `null`."""
    if isinstance(value, tuple):
        share_texts = ",".join(f"{share:g}" for share in value)
        return share_texts if len(value) == 1 else f"[{share_texts}]"
    return "null" if value is None else str(value)


def _methods(methods: Nodes, variants: Nodes) -> None:
    if not methods and not variants:
        raise ConfigError(f"no method is chosen; allowed: {', '.join(options('method'))}; write method=<name>")
    for name, node in methods.items():
        if node["base"] == CUSTOM:
            method_file_checks.check(node["path"])
        reading = node.get("reading")
        for value in [] if reading is None else _values(f"methods.{name}.reading", reading):
            _one_of(f"methods.{name}.reading", value, schema.READINGS)
        if reading is not None and node["base"] == FULL:
            raise ConfigError(
                f"methods.{name}.reading={reading} has no effect, because {FULL} compresses nothing; remove it, "
                "or give it to another method"
            )


def _gate(gate: Gate, datasets: Nodes, data: Data) -> None:
    """Check `gate.expected`, the full cache's score in a paper. It needs one dataset, with real data and a metric."""
    if gate.expected is None:
        return
    gate_setting = f"gate.expected={gate.expected}"
    if len(datasets) > 1:
        raise ConfigError(
            f"{gate_setting} is one score, but the run has {len(datasets)} datasets; allowed: one dataset, whose first metric it "
            "is compared with; run the datasets one by one, or drop gate.expected"
        )
    if data.source == "fixture":
        raise ConfigError(
            f"{gate_setting} compares full with a paper's score, but data=fixture is made up; give real data, or "
            "drop gate.expected"
        )
    ((name, node),) = datasets.items()
    if not node.get("metrics"):
        raise ConfigError(
            f"{gate_setting} has no metric to be compared with, because datasets.{name}.metrics is empty; "
            "allowed: a metric of the "
            "task; give dataset.metrics=[<metric>]"
        )


def _variants(methods: Nodes, variants: Nodes, folders: tuple[str, ...]) -> None:
    method_names = options("method", folders)
    for name, changes in variants.items():
        if not isinstance(changes, Mapping) or "base" not in changes:
            raise ConfigError(
                f"variants.{name}={changes} names no base; allowed: variants.{name}={{base: <method>, <parameter>: "
                f"<value>}}; give a base ({', '.join(method_names)})"
            )
        if not _NAME.fullmatch(str(name)):
            raise ConfigError(
                f"variants.{name} is not a name; allowed: letters, digits and _ . + -; rename the variant"
            )
        base_name = str(changes["base"])
        if base_name not in method_names:
            raise ConfigError(f"variants.{name}.base={base_name!r} is unknown; {nearest(base_name, method_names)}")
        if base_name == FULL:
            raise ConfigError(
                f"variants.{name}.base=full has no parameters to vary; allowed: {', '.join(method_names)}"
            )
        if base_name == CUSTOM:
            method_file_checks.check(changes.get("path", (methods.get(CUSTOM) or {}).get("path")), str(name))
        if name in methods:
            raise ConfigError(f"variants.{name} has the name of a method of this run; give the variant another name")
        for value in _values(f"variants.{name}.reading", changes.get("reading", "paper")):
            _one_of(f"variants.{name}.reading", value, schema.READINGS)


def _model(model: Model) -> None:
    from mmkv_bench.models.files import is_gguf, model_files
    from mmkv_bench.models.gguf import tensor_types
    from mmkv_bench.models.source import RANDOM, Source

    source = Source.of(model)
    if source.kind == RANDOM:
        return
    path = str(model.path)
    model_path = Path(source.place)
    if model_path.is_dir():
        model_files(model_path)
    elif is_gguf(model_path):
        tensor_types(model_path)
    elif model_path.exists():
        raise ConfigError(
            f"model.path={model_path} is a file; allowed: the folder with config.json, or a .gguf file; give one of these"
        )
    elif path.startswith((".", "/", "~", schema.PACKAGE_SCHEME)) or not _HUB_ID.fullmatch(path):
        raise ConfigError(
            f"model folder {path} does not exist; allowed: an existing folder of a Hugging Face checkpoint or a hub id "
            "(org/name); check the path"
        )


def _out(out: str) -> None:
    path = Path(out).expanduser()
    if not out.strip():
        raise ConfigError("out is empty; allowed: a folder name; write out=runs/<name>")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"out={out} is a file; allowed: a folder that exists or can be made; give another name")
    existing_parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing_parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"out={out} cannot be written ({existing_parent} is read-only); name a folder below a writable one"
        )


def _values(key: str, value: Any) -> list[Any]:
    values = as_list(value)
    if not values:
        raise ConfigError(f"{key}=[] is an empty list; allowed: at least one value; give one")
    return values


def _one_of(key: str, value: Any, words: tuple[str, ...]) -> None:
    if value not in words:
        suggestion = nearest(str(value), words)
        raise ConfigError(
            f"{key}={value} is unknown; {suggestion}" + ("" if suggestion.endswith("?") else "; choose one of these")
        )


# ---------------------------------------------------------------------- missing devices and packages
def refuse_missing_requirements(answering: AnswerConfig, stage: str, out: str) -> None:
    """Raise ConfigError if this machine lacks a CUDA driver, a compiler or flash-attn that the configuration needs.

    If the store at `out` exists, nothing is refused yet, because the run may have no missing rows.
    """
    model = answering.model
    if stage == "score" or (Path(out).expanduser() / "store.json").exists():
        return
    if model.device == "cuda" and devices.KINDS["cuda"].ruled_out():
        raise no_cuda_error(model, model.dtype)
    if model.attention == FLASH:
        check_flash_attn()
    if answering.decode == COMPILED:
        check_compiler()


def no_cuda_error(model: Model, dtype: str) -> ConfigError:
    """Return the error for model.device=cuda without a CUDA device. The message has the size of the weights.

    dtype: precision of the weights; `auto` if unknown.
    """
    parameters = (model.about or {}).get("parameters")
    size_note = ""
    if parameters and model.layers is None:
        weights_gib = parameters * (4 if dtype == "float32" else 2) / 2**30
        precision = "half precision" if dtype == "auto" else dtype
        size_note = f" with more than {weights_gib:.1f} GiB: {parameters / 1e9:.2f} B parameters in {precision}, before any cache"
    remedy = "write model.device=cpu"
    if model.shape:
        remedy = "a form shrunk to two layers of random weights runs on CPU: model.weights=random model.layers=2 model.device=cpu"
    return ConfigError(
        f"model.device=cuda, but this machine has no CUDA device; this run needs one{size_note}; allowed "
        f"here: cpu, auto; {remedy}"
    )
