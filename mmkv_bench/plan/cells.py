"""The cells of a configuration: all combinations of model, dataset, method, budget, protocol, reading and seed.

The hash of a cell covers only what its answers depend on. Runs with a larger `limit`, another shard or more methods
thus reuse stored rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from mmkv_bench import protocols
from mmkv_bench.calibrate.artefact import Calibrations
from mmkv_bench.compression.budget import Budget, StateCost
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import AnswerConfig, GridConfig, MethodConfig, as_list, merged
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.methods.build import FULL, OUTSIDE, build_compressor, compressor_of, identity_form
from mmkv_bench.methods.node import DECODING, parameters_json, under_reading, with_checksums
from mmkv_bench.plan.validate import validate_variants
from mmkv_bench.store.files import canonical_json, checksum
from mmkv_bench.store.schema import NUMERICS_VERSION

if TYPE_CHECKING:
    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.protocols import StreamSettings

Node = Mapping[str, Any]
"""A method's settings in a configuration, as plain values."""

_PROMPT_SETTINGS = ("min_pixels", "max_pixels", "max_prompt_tokens")
_VIDEO_SETTINGS = ("frames", "video_max_pixels")  # part of the identity only if they are set


@dataclass(frozen=True)
class DatasetIdentity:
    """Facts about a dataset that a cell's hash covers.

    Attributes:
        fingerprint: checksum of the content.
        prompt: what shapes a prompt, such as the lmms-eval task and the prompt texts.
        generation: generation settings.
        context, questions: `context_key` and `questions_key` of the dataset. The hash covers both only if the protocol
            cuts the prompt.
    """

    fingerprint: str
    prompt: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    context: str | None = None
    questions: str | None = None


@dataclass(frozen=True)
class Identity:
    """Facts outside the configuration that planning needs.

    Attributes:
        model_fingerprint: checksum of weights, configuration and processor files.
        model_revision: commit on the hub; None for local folders.
        dtype: resolved dtype, such as `float32`.
        datasets: name to facts, for every chosen dataset.
        cost: bytes of the model's state, for budgets given in bytes; None if unknown. No hash covers this.
    """

    model_fingerprint: str
    model_revision: str | None
    dtype: str
    torch: str
    transformers: str
    datasets: Mapping[str, DatasetIdentity]
    cost: StateCost | None = None


@dataclass(frozen=True)
class Cell:
    """A method at one budget, with model, dataset, protocol, reading and seed, and the objects that run it.

    All fields but `compressor`, `budget` and `calibrations` are columns of the table `cells`.
    """

    cell: str
    model: str
    model_fingerprint: str
    model_revision: str | None
    dataset: str
    dataset_fingerprint: str
    method: str
    base: str
    reading: str | None
    protocol: str
    budget_kind: str
    budget_entries: int | None
    budget_fraction: str | None
    seed: int | None
    parameters: str
    tuned: bool
    allocation_scope: str | None
    dtype: str
    attention: str
    generation: str
    numerics_version: int
    method_version: int | None
    torch: str
    transformers: str
    compressor: Compressor = field(compare=False, repr=False)
    budget: Budget | None = field(compare=False, repr=False)
    calibrations: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def row(self) -> dict[str, Any]:
        """Return the cell's identity columns of the table `cells`."""
        excluded_fields = ("compressor", "budget", "calibrations")
        return {key: value for key, value in self.__dict__.items() if key not in excluded_fields}

    def config_additions(self) -> dict[str, Any]:
        """Return what the configuration of the cell's row has in addition: calibration samples, and the bytes of a
        budget."""
        calibration_values = {"calibrations": dict(self.calibrations)} if self.calibrations else {}
        budget_bytes = None if self.budget is None else self.budget.in_bytes
        return calibration_values if budget_bytes is None else {**calibration_values, "budget_in_bytes": budget_bytes}

    @property
    def rule(self) -> protocols.Protocol:
        """Return the cell's protocol: which parts of a prompt are prefilled, compressed and fed again."""
        return protocols.protocol(self.protocol)

    @property
    def stream(self) -> protocols.StreamSettings:
        """Return the cell's settings of protocol=stream, or the defaults."""
        return protocols.StreamSettings(**json.loads(self.generation).get("stream") or {})

    @property
    def label(self) -> str:
        """Name of the cell among a dataset's cells, such as `snapkv@64 strict seed=1`."""
        label_parts = [self.method if self.budget is None else f"{self.method}@{self.budget}"]
        label_parts += [self.protocol] * (self.protocol != protocols.DEFAULT)
        label_parts += [self.reading] if self.reading not in (None, "paper") else []
        label_parts += [f"at={self.stream.ask_at:g}"] if self.stream.ask_at != protocols.READ_AS_ASKED.ask_at else []
        return " ".join(label_parts + ([f"seed={self.seed}"] if self.seed is not None else []))


def stored_rows(
    cells: Iterable[Cell], resolved: Mapping[str, Any], provenance: Mapping[str, Any], prompt_format: str | None = None
) -> list[dict[str, Any]]:
    """Return rows of the table `cells`, one per cell.

    resolved: the run's configuration (`RunConfig.resolved`).
    provenance: the result of `identity.provenance`.
    prompt_format: prompt format of the loaded model.
    """
    origin_columns = ("git_commit", "git_dirty", "versions", "device", "driver", "cpu", "weights", "weights_file")
    common_columns = {key: provenance[key] for key in origin_columns} | {"prompt_format": prompt_format}
    return [
        cell.row() | common_columns | {"config": json.dumps({**resolved, **cell.config_additions()}, sort_keys=True)}
        for cell in cells
    ]


@dataclass(frozen=True)
class Method:
    """A built method under one reading: as the paper's text says, or as its released code does.

    plain: the settings that run (see `build.identity_form`), with the checksums of used calibrations.
    decoding: text of a decode policy that the user set.
    calibrations: checksum of each used calibration to a description of its samples.
    """

    name: str
    plain: Mapping[str, Any]
    compressor: Compressor
    tuned: bool
    decoding: str | None = None
    calibrations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        return self.plain.get("base") == FULL


@dataclass(frozen=True)
class MethodEntry:
    """A method of a configuration under one reading, not built yet.

    node: settings with the run's overrides.
    default: settings without overrides.
    """

    name: str
    node: Node
    default: Node
    reading: str


def method_entries(config: MethodConfig, defaults: Mapping[str, Node] | None = None) -> list[MethodEntry]:
    """Return the methods and variants of a run under each of their readings, the full cache first.

    Args:
        config: methods, variants, readings and baseline of the run.
        defaults: name to settings without overrides, for all names of `bases`. None reads the files.

    Raises:
        ConfigError: a variant that its base does not allow, or two methods of one name.
    """
    defaults = method_defaults(bases(config.methods, config.variants), config.folders) if defaults is None else defaults
    validate_variants(config.variants, config.folders, defaults)
    node_and_default_by_name = {name: (node, defaults[name]) for name, node in config.methods.items()}
    for name, changes in config.variants.items():
        if name in node_and_default_by_name:
            raise ConfigError(f"variants.{name} has the name of a method of this run; give the variant another name")
        base_name = str(changes["base"])
        node_and_default_by_name[name] = (
            _variant_node(changes, config.methods.get(base_name, defaults[base_name])),
            defaults[base_name],
        )
    chosen_full = [name for name, (node, _) in node_and_default_by_name.items() if node["base"] == FULL]
    if chosen_full:
        node_and_default_by_name = {
            name: node_and_default_by_name[name]
            for name in (*chosen_full, *(n for n in node_and_default_by_name if n not in chosen_full))
        }
    elif config.baseline == FULL:
        node_and_default_by_name = {FULL: (defaults[FULL], defaults[FULL]), **node_and_default_by_name}
    return [
        MethodEntry(name, node, default, reading)
        for name, (node, default) in node_and_default_by_name.items()
        for reading in dict.fromkeys(config.reading if node.get("reading") is None else as_list(node["reading"]))
    ]


def expand(
    grid: GridConfig, identity: Identity, entries: Sequence[MethodEntry], lacking: list[str] | None = None
) -> tuple[list[Cell], list[str]]:
    """Return all cells of a run, and notes for the user.

    Args:
        grid: datasets, protocols, budgets and seeds of the run.
        identity: facts outside the configuration.
        entries: the run's methods.
        lacking: this function adds a sentence per method without its calibration. The hashes of such a method's cells
            match no run. None raises CalibrationError instead.

    Returns:
        Cells without duplicates, ordered by dataset, protocol, method, budget, seed and `ask_at` of a stream.
        Notes about cells that are equal, methods that reading=released does not change, and budgets in bytes.

    Raises:
        ConfigError: two cells have one name, or a method cannot be built.
        CalibrationError: a calibrated method has no artefact of this model.
    """
    artefacts = Calibrations(grid.answering.model.name, identity.model_fingerprint)
    methods = build_methods(entries, artefacts, identity.dtype, lacking)
    budgets = list(dict.fromkeys(Budget.parse(value, identity.cost) for value in grid.budget))
    seeds = list(dict.fromkeys(grid.seed))
    cells: dict[str, Cell] = {}
    note_set = {note: None for method in methods if (note := _no_released_values_note(method))}
    state_bytes = identity.cost.beside if identity.cost else 0
    state_clause = f", when {state_bytes:,} bytes of windows and recurrent states are paid" if state_bytes else ""
    for one in budgets:
        if one.in_bytes:
            note_set[f"budget={one.in_bytes} of all state is {one} entries per KV head{state_clause}"] = None
    for dataset, protocol in product(grid.datasets, dict.fromkeys(grid.protocol)):
        for method in methods:
            for budget, seed, stream in product(
                [None] if method.compressor.unbudgeted else budgets,
                seeds if method.compressor.stochastic else [None],
                grid.answering.stream if protocols.protocol(protocol).streams else [None],
            ):
                cell = _cell(grid.answering, identity, dataset, protocol, method, budget, seed, stream)
                first_equal_cell = cells.setdefault(cell.cell, cell)
                if first_equal_cell.method != cell.method:
                    note_set[
                        f"{cell.label} is the same cell as {first_equal_cell.label}: it runs once, as {first_equal_cell.method}"
                    ] = None
    _refuse_shared_names(cells.values())
    return list(cells.values()), list(note_set)


def _no_released_values_note(method: Method) -> str | None:
    """Return a note if reading=released changes no parameter of a method; else None."""
    if method.is_full or method.compressor.reading != "released" or method.plain.get("released"):
        return None
    return f"reading=released changes no parameter of {method.name}, whose file has no released values (see docs/methods.md)"


def build_methods(
    entries: Sequence[MethodEntry],
    calibrations: Calibrations | None = None,
    dtype: str | None = None,
    lacking: list[str] | None = None,
) -> list[Method]:
    """Build the methods of a run. Raises the errors of `expand`.

    calibrations: the model's calibration artefacts. None builds methods that can be checked but not run.
    lacking: see `expand`.
    """
    methods = []
    for entry in entries:
        try:
            methods.append(_build(entry, calibrations, dtype))
        except CalibrationError as error:
            if lacking is None:
                raise
            lacking += [str(error)] * (str(error) not in lacking)
            if calibrations is not None:
                calibrations.taken()  # what this method read belongs to no other
            methods.append(_build(entry, None, dtype))
    return methods


def bases(methods: Iterable[str], variants: Mapping[str, Node]) -> list[str]:
    """Return the names of the method files that a run reads: of its methods, of its variants' bases, and `full`."""
    return list(dict.fromkeys([*map(str, methods), *(str(node["base"]) for node in variants.values()), FULL]))


def _build(entry: MethodEntry, calibrations: Calibrations | None, dtype: str | None) -> Method:
    name, node, default, reading = entry.name, entry.node, entry.default, entry.reading
    node_that_runs = under_reading(name, node, reading, default)
    compressor = compressor_of(name, node_that_runs, reading, calibrations)
    effective_node = identity_form(node_that_runs, compressor, dtype)
    is_tuned = node != default and _hashed_settings(effective_node) != _hashed_settings(
        _default_identity_form(entry, effective_node, compressor, dtype)
    )
    used_checksums = {} if calibrations is None else calibrations.taken()
    decoding = str(compressor.decoding) if node.get(DECODING) != default.get(DECODING) else None  # as written
    samples_by_checksum = (
        {} if calibrations is None else {checksum: calibrations.seen[checksum] for checksum in used_checksums.values()}
    )
    return Method(
        name, with_checksums(effective_node, used_checksums), compressor, is_tuned, decoding, samples_by_checksum
    )


def _default_identity_form(
    entry: MethodEntry, plain: Mapping[str, Any], compressor: Compressor, dtype: str | None
) -> Mapping[str, Any]:
    """Return the identity form of a method without the run's parameters, which shows whether the run tuned the method.

    A chosen file or press is not tuning. If the method cannot be built without arguments, return `plain`, which counts
    as untuned.
    """
    name, default, reading = entry.name, entry.default, entry.reading
    code_parameters = OUTSIDE.get(str(default["base"]))
    if code_parameters is None:
        return identity_form(under_reading(name, default, reading), compressor, dtype)
    default_with_code = {**default, **{key: entry.node[key] for key in code_parameters}}
    try:
        return identity_form(
            under_reading(name, default_with_code, reading), build_compressor(name, default_with_code, reading), dtype
        )
    except ConfigError:
        return plain


def _variant_node(changes: Node, base: Node) -> Node:
    """Return a variant's settings: those of `base`, which has the run's overrides, changed by `changes`."""
    # a decode policy is replaced whole: two policies have different parameters
    base_node = {**base, DECODING: None} if DECODING in changes else base
    return merged(base_node, {key: value for key, value in changes.items() if key != "base"})


def _cell(
    config: AnswerConfig,
    identity: Identity,
    dataset: str,
    protocol: str,
    method: Method,
    budget: Budget | None,
    seed: int | None,
    stream: StreamSettings | None,
) -> Cell:
    dataset_identity = identity.datasets[dataset]
    reading = None if method.is_full else method.compressor.reading
    # In half precision, compiled steps may choose other tokens. Eager cells keep the hashes from before `decode` existed.
    generation = dict(dataset_identity.generation) | ({} if config.decode == "eager" else {"decode": config.decode})
    if stream is not None:
        generation["stream"] = {
            key: value
            for key, value in vars(stream).items()
            if key == "every" or value != getattr(protocols.READ_AS_ASKED, key)
        }
    document_keys = (
        {"context": dataset_identity.context, "questions": dataset_identity.questions}
        if protocols.protocol(protocol).cuts
        else {}
    )
    given_document_keys = {key: value for key, value in document_keys.items() if value}
    hashed_values = {
        "model": identity.model_fingerprint,
        "processor": {key: getattr(config.model, key) for key in _PROMPT_SETTINGS}
        | {key: value for key in _VIDEO_SETTINGS if (value := getattr(config.model, key)) is not None},
        "dataset": {
            "name": dataset,
            "content": dataset_identity.fingerprint,
            "prompt": {**dataset_identity.prompt, **given_document_keys},
        },
        "generation": generation,
        "method": _hashed_settings(method.plain),
        "budget": None if budget is None else [budget.kind, budget.entries, budget.fraction_text],
        "protocol": protocol,
        "reading": reading,
        "seed": seed,
        "dtype": identity.dtype,
        "attention": config.model.attention,
        "numerics_version": NUMERICS_VERSION,
        "torch": identity.torch,
        "transformers": identity.transformers,
    }
    method_version = None if method.is_full else method.compressor.version_at(budget)
    method_version = None if method_version == 1 else method_version
    if method_version is not None:  # absent in the first version: those cells are older than versions of methods
        hashed_values["method_version"] = method_version
    return Cell(
        cell=checksum(canonical_json(hashed_values).encode()),
        model=config.model.name,
        model_fingerprint=identity.model_fingerprint,
        model_revision=identity.model_revision,
        dataset=dataset,
        dataset_fingerprint=dataset_identity.fingerprint,
        method=method.name,
        base=str(method.plain["base"]),
        reading=reading,
        protocol=protocol,
        budget_kind="none" if budget is None else budget.kind,
        budget_entries=None if budget is None else budget.entries,
        budget_fraction=None if budget is None else budget.fraction_text,
        seed=seed,
        parameters="{}" if method.is_full else parameters_json(method.plain, method.decoding),
        tuned=method.tuned,
        allocation_scope=None if method.is_full else method.compressor.scope,
        dtype=identity.dtype,
        attention=config.model.attention,
        generation=json.dumps(generation, sort_keys=True),
        numerics_version=NUMERICS_VERSION,
        method_version=method_version,
        torch=identity.torch,
        transformers=identity.transformers,
        compressor=method.compressor,
        budget=budget,
        calibrations=method.calibrations,
    )


def _hashed_settings(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that can change answers, which the hash covers."""
    if plain.get("base") == FULL:
        return {"base": FULL}
    return {key: value for key, value in plain.items() if key not in ("reading", "released", "later", "about")}


def _refuse_shared_names(cells: Iterable[Cell]) -> None:
    cell_by_name: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        earlier_cell = cell_by_name.setdefault((cell.dataset, f"{cell.label} {cell.reading} {cell.protocol}"), cell)
        if earlier_cell.cell != cell.cell:
            raise ConfigError(
                f"two different cells are both named {cell.label!r} on {cell.dataset}; give one of them another name with "
                "variants.<name>={base: <method>, ...}"
            )
