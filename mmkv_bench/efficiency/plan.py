"""Plan of `scenario=efficiency`: its cells, the order of their passes, and the refusals before any work.

A cell is one (method, budget) setting under one protocol, on one kind of prompts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmkv_bench import devices, protocols
from mmkv_bench.compression.budget import LARGEST
from mmkv_bench.config.schema import MAX, SHORTEST, TOGETHER, EfficiencyConfig, Model, RunConfig
from mmkv_bench.efficiency.search import Search, search_state
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.families.facts import ModelFacts, model_facts
from mmkv_bench.methods.part_rules import visual_parts
from mmkv_bench.models.load import quiet_libraries
from mmkv_bench.models.source import RANDOM, Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, DatasetIdentity, expand, method_entries
from mmkv_bench.plan.plan import Plan
from mmkv_bench.plan.validate import bytes_of, validate_combinations
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    from mmkv_bench.efficiency.stored_divisions import Profile


TEXT, IMAGE, VIDEO = "text", "image", "video"
DATASETS = {TEXT: "made_up_text", IMAGE: "made_up_image", VIDEO: "made_up_video"}
"""Kind of prompts -> dataset name in rows."""
SCHEMES = {TEXT: 1, IMAGE: 1, VIDEO: 1}
"""Kind of prompts -> version of how they are made, which enters the hash of every cell."""


def kind_of(dataset: str) -> str:
    """Return the kind of prompts (text, image or video) of a dataset name in rows."""
    return next(kind for kind, name in DATASETS.items() if name == dataset)


class PassId(NamedTuple):
    """Key of one pass: one cell on a batch of `batch` prompts of `tokens` tokens each.

    repeat: number of the timed pass; None for the pass that counts memory. prefill: how the batch's prompts are
    prefilled (`together`, `one_by_one`); None for one prompt.
    """

    cell: str
    tokens: int
    batch: int
    repeat: int | None = None
    prefill: str | None = None

    @property
    def shape(self) -> PassId:
        """The pass of the same cell, length and batch that counts memory; equal for all repeats."""
        return self._replace(repeat=None)


@dataclass(frozen=True, kw_only=True)
class EfficiencyPlan(Plan):
    """Plan of scenario=efficiency: cells, `full` first under each protocol, and the passes that measure them.

    Attributes:
        lengths: lengths of the prompts [tokens].
        batches: the requested numbers of sequences.
        searches: whether the largest batch is searched too.
        memory_limit: limit of passes that count memory [bytes].
        profiles: cell -> stored row whose division of the budget among layers and heads the cell uses.
        room: memory that the largest batch may use [bytes], None if unknown.
    """

    family: ModelFacts
    pass_config: EfficiencyConfig
    lengths: Sequence[int]
    batches: Sequence[int]
    searches: bool
    memory_limit: int | None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    room: int | None = None

    def shape(self, cell: str, tokens: int, batch: int) -> PassId:
        """Return the pass that counts the memory of a cell at this length and batch size."""
        return PassId(cell, tokens, batch, prefill=self.pass_config.batch_prefill if batch > 1 else None)

    @property
    def places(self) -> list[tuple[str, int]]:
        """All pairs (hash of a cell, prompt length)."""
        return list(product(self.names, self.lengths))

    @property
    def kinds(self) -> list[str]:
        """Kinds of prompts (text, image, video) that the plan measures."""
        return list(dict.fromkeys(kind_of(cell.dataset) for cell in self.cells))

    @property
    def shapes(self) -> list[PassId]:
        """Passes that count memory for the requested batch sizes, without those of searches."""
        return [self.shape(*place, batch) for place, batch in product(self.places, self.batches)]

    def search(self, outcomes: Mapping[PassId, str], cell: str, tokens: int) -> Search:
        """Return the state of the search for the largest batch of a cell and length. outcomes: pass -> status."""
        outcome_by_size: dict[int, str] = {}
        for unit, status in outcomes.items():
            shape = unit.shape
            if shape == self.shape(cell, tokens, shape.batch) and (unit.repeat is None or status != "ok"):
                outcome_by_size[shape.batch] = (
                    outcome_by_size[shape.batch] if outcome_by_size.get(shape.batch, "ok") != "ok" else status
                )
        return search_state(outcome_by_size, self.room)

    def unconfirmed(self, outcomes: Mapping[PassId, str]) -> set[PassId]:
        """Return the largest batches of ended searches that were measured with copies in place of a full batch.

        Such a pass must run again with every sequence prefilled. outcomes: pass -> status.
        """
        if not self.searches:
            return set()
        ended_searches = [
            (place, search) for place in self.places if (search := self.search(outcomes, *place)).next is None
        ]
        largest_passes = {self.shape(*place, search.largest) for place, search in ended_searches if search.largest}
        return {unit for unit in largest_passes if getattr(outcomes.get(unit), "copied", False)}

    @property
    def units(self) -> list[PassId]:
        """All passes of the requested batch sizes. A search for the largest batch adds others."""
        return order(self.shapes, self.pass_config.repeats, self.pass_config.order_seed)

    def passes(self, outcomes: Mapping[PassId, str]) -> list[PassId]:
        """Return all passes known so far, in the order in which they run. outcomes: pass -> status.

        Timed passes follow when all searches for a largest batch have ended, with confirmed results (`unconfirmed`).
        """
        shapes, memory_passes = self.shapes, order(self.shapes, 0, self.pass_config.order_seed)
        if self.searches:
            searches = [self.search(outcomes, *place) for place in self.places]
            sizes_of_searches = [[*one.tried, *([] if one.next is None else [one.next])] for one in searches]
            for level in range(max(map(len, sizes_of_searches))):
                searches_at_level = [
                    (place, sizes)
                    for place, sizes in zip(self.places, sizes_of_searches, strict=True)
                    if level < len(sizes)
                ]
                memory_passes += [self.shape(*place, sizes[level]) for place, sizes in searches_at_level]
            if any(one.next is not None for one in searches) or self.unconfirmed(outcomes):
                return [*dict.fromkeys(memory_passes)]
            largest_by_place = [
                (place, one.largest) for place, one in zip(self.places, searches, strict=True) if one.largest
            ]
            shapes = [*dict.fromkeys([*shapes, *(self.shape(*place, size) for place, size in largest_by_place)])]
        timed_passes = order(shapes, self.pass_config.repeats, self.pass_config.order_seed)[len(shapes) :]
        return [*dict.fromkeys([*memory_passes, *timed_passes])]

    def cell(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.cell == name)

    @property
    def baselines(self) -> dict[str, str]:
        """Each cell -> the full-cache cell that its ratios divide by: same kind of prompts, same protocol."""
        full_cell_by_setting = {
            (cell.dataset, cell.protocol): cell.cell for cell in self.cells if cell.compressor.is_full
        }
        return {cell.cell: full_cell_by_setting[cell.dataset, cell.protocol] for cell in self.cells}


def plan_passes(config: RunConfig, outline: bool = False) -> EfficiencyPlan:
    """Return the plan of a validated configuration. The model's files are read, but no weights are loaded.

    outline: plan only what is known without a connection, as `planner.outline`.

    Raises MMKVError: settings of other scenarios, methods that cannot be measured, a length beyond the model's context.
    """
    _refuse_unused_settings(config)
    quiet_libraries()
    prompt_kinds = list(dict.fromkeys(config.prompts))
    # All ratios are relative to the full cache.
    config = config.updated(baseline="full", datasets={DATASETS[kind]: {} for kind in prompt_kinds})
    source = Source.of(config.model)
    described = source.described_here() if outline else source.described
    if described is None:
        raise ConfigError(
            f"scenario=efficiency cannot plan {config.model.name}: its config.json is not on this machine; "
            "allowed: a model of conf/model, or one fetched before; fetch this model, or choose another"
        )
    family = model_facts(described)
    generation = {"max_new_tokens": int(config.new_tokens), "ends": "length"}
    identity_by_dataset = {
        DATASETS[kind]: DatasetIdentity(f"scheme {SCHEMES[kind]}", {"prompt": kind}, generation)
        for kind in prompt_kinds
    }
    stored_cells = Store(Path(config.out).expanduser()).cells() if outline else None
    identity = (
        identities.gather(config.model, {})
        if stored_cells is None
        else identities.outline(config.model, {}, stored_cells)
    )
    identity, entries = replace(identity, datasets=identity_by_dataset), method_entries(config.method_config)
    uncalibrated_methods: list[str] | None = [] if outline else None
    cells, notes = expand(config.grid, identity, entries, uncalibrated_methods)
    notes += uncalibrated_methods or ()
    for kind in prompt_kinds:
        if kind != TEXT and kind not in (media_of_family := family.rules.media):
            raise UnsupportedError(
                f"prompts={kind}: {family.name} takes no {kind}s; allowed: {', '.join((TEXT, *media_of_family))}; choose one"
            )
    validate_combinations(config.protocol, family, [cell.compressor for cell in cells], uncut=())
    for cell in cells:
        _refuse_method(cell)
    cells, profiles = _replay_divisions(config.profiles, cells, source.kind == RANDOM, family)
    lengths = _lengths_within_limits(config.model, config.new_tokens, list(dict.fromkeys(config.lengths)), family)
    _refuse_long(config.model, config.new_tokens, lengths, family)
    if len(lengths) < len(set(config.lengths)):
        notes.append(
            f"default lengths beyond the limit of {config.model.name} are left out; lengths=[...] sets other lengths"
        )
    batches = list(dict.fromkeys(config.batch))
    batch_sizes = [batch for batch in batches if isinstance(batch, int)]
    memory_limit = bytes_of(config.memory_limit, "memory_limit")
    for cell in cells if batches != [1] else ():
        _refuse_policy(cell, config.batch_prefill)
    available_bytes = (
        memory_limit if outline else _available_bytes(config.model, config.memory_limit, MAX in batches, memory_limit)
    )
    notes += [f"{cell.label} divides its budget as {profiles[cell.cell]}" for cell in cells if cell.cell in profiles]
    return EfficiencyPlan.of(
        config,
        entries,
        cells,
        pass_config=config.efficiency,
        parts=(),
        notes=notes,
        family=family,
        lengths=lengths,
        batches=batch_sizes,
        searches=MAX in batches,
        memory_limit=memory_limit,
        profiles=profiles,
        room=available_bytes,
    )


def order(shapes: Sequence[PassId], repeats: int, seed: int) -> list[PassId]:
    """Return all passes in the order in which they run. shapes: the passes that count memory.

    Passes that count memory come first; they also show which batches run out of memory. Then come the timed passes:
    each repeat has all shapes in a new random order, so that drift affects all shapes alike.
    """
    generator = random.Random(f"order/{seed}")
    ordered_passes = []
    for repeat in (None, *range(repeats)):
        repeats_of_shapes = [shape._replace(repeat=repeat) for shape in shapes]
        generator.shuffle(repeats_of_shapes)
        ordered_passes += repeats_of_shapes
    return ordered_passes


def _refuse_unused_settings(config: RunConfig) -> None:
    if list(config.datasets) != ["pages"]:
        raise ConfigError(
            f"scenario=efficiency takes no dataset but got dataset={','.join(map(str, config.datasets))}: its "
            "prompts are made up by prompts=text, image or video and lengths=[...]; leave dataset out"
        )
    for key, allowed in {"stage": "both", "shard": "0/1", "samples": None, "judge.kind": "none"}.items():
        if (setting := attrgetter(key)(config)) != allowed:
            raise ConfigError(f"{key}={setting} has no effect under scenario=efficiency; leave it out")
    for name in config.protocol:
        rule = protocols.protocol(str(name))
        if rule.cuts or rule.prefills_again:
            raise UnsupportedError(
                f"protocol={name} is not timed by scenario=efficiency, because its passes prefill a whole prompt "
                "once, as a server does; allowed: paper, strict; choose one"
            )


def _available_bytes(model: Model, given: int | str | None, searches: bool, limit: int | None) -> int | None:
    """Return the memory that the largest batch may use [bytes]: `limit`, or the device's if a batch is searched, or
    None.

    A search on the CPU without a limit, and a limit (`given` by the user) above the device's memory, are refused.
    """
    if limit is None and not searches:
        return None
    device_kind = devices.kind_of(model.device)
    if limit is None and device_kind == "cpu":
        raise ConfigError(
            "batch=max on the CPU would fill this machine's memory before it fails; give memory_limit=8GiB or "
            "another amount"
        )
    device_bytes = devices.at(device_kind).total_bytes()
    if limit is not None and limit > device_bytes:
        raise ConfigError(f"memory_limit={given} is more than the device's {device_bytes / 2**30:.1f} GiB; give less")
    return device_bytes if limit is None else limit


def _refuse_policy(cell: Cell, way: str) -> None:
    """Refuse a cell whose method cannot act in a batch that is prefilled in this way (`together` or `one_by_one`)."""
    policy = cell.compressor.decoding
    if cell.compressor.needs.replay and way == TOGETHER:
        raise UnsupportedError(
            f"method {cell.method} feeds one prompt's context again, but batch_prefill=together prefills several; "
            "use batch_prefill=one_by_one, or leave the method out"
        )
    if policy is None:
        return
    if policy.moves_queries:
        raise UnsupportedError(
            f"method {cell.method} gives its tokens the positions of one sequence's cache, so it decodes alone; "
            "leave it out of batches, or use batch=1"
        )
    if way == TOGETHER:
        raise UnsupportedError(
            f"method {cell.method} has a decode policy for one sequence, but batch_prefill=together prefills "
            "several; use batch_prefill=one_by_one, or leave the method out"
        )


def _refuse_method(cell: Cell) -> None:
    """Refuse a cell whose method has no meaningful latency, or needs visual tokens that its prompts lack."""
    compressor = cell.compressor
    if compressor.needs.answer:
        raise UnsupportedError(
            f"method {cell.method} reads the full cache's answer before it compresses, so it has no latency; "
            "leave it out of scenario=efficiency"
        )
    if kind_of(cell.dataset) == TEXT and (compressor.needs_visual or visual_parts(compressor)):
        raise ConfigError(
            f"method {cell.method} needs visual tokens, but prompts=text has none; allowed: prompts=image or "
            "prompts=video; choose one, or leave the method out"
        )


def _replay_divisions(
    folder: str | None, cells: Sequence[Cell], random_weights: bool, family: ModelFacts
) -> tuple[list[Cell], dict[str, Profile]]:
    """Make methods divide their budgets among layers and heads as stored rows of real prompts did.

    Only methods with a prompt-dependent division need this, and only with random weights. Return all cells, and cell ->
    the stored row whose division it uses. folder: store with the rows.
    """
    from mmkv_bench.efficiency.stored_divisions import refuse_unprofiled, with_profile

    cells_with_profiles, profiles = [], {}
    for cell in cells:
        allocator = cell.compressor.allocator
        if not random_weights or allocator is None or not allocator.follows_prompt:
            cells_with_profiles.append(cell)
            continue
        refuse_unprofiled(cell)
        if folder is None:
            raise UnsupportedError(
                f"method {cell.method} divides its budget by the prompt's scores ({type(allocator).__name__}), "
                "which random weights would distort; allowed: profiles=<folder of its rows of real prompts>, or "
                "real weights (model.weights=<folder>); give one, or leave the method out"
            )
        cell, profile = with_profile(cell, folder, family)
        profiles[cell.cell] = profile
        cells_with_profiles.append(cell)
    if folder is not None and not profiles:
        raise ConfigError(
            f"profiles={folder} is not used by any method of this run: only random weights with a method that divides "
            "its budget by the prompt need it; leave it out"
        )
    return cells_with_profiles, profiles


def _lengths_within_limits(model: Model, new_tokens: int, lengths: list[int], family: ModelFacts) -> list[int]:
    """Return the prompt lengths without default ones beyond the model's limits. Lengths chosen by the user stay."""
    if tuple(lengths) != RunConfig().lengths:
        return lengths
    longest_prompt = min(
        LARGEST if family.max_context is None else family.max_context - (new_tokens - 1),
        model.max_prompt_tokens or LARGEST,
    )
    return [tokens for tokens in lengths if tokens <= longest_prompt] or lengths


def _refuse_long(model: Model, new_tokens: int, lengths: Sequence[int], family: ModelFacts) -> None:
    tokens_by_limit = {"the model's context": family.max_context, "model.max_prompt_tokens": model.max_prompt_tokens}
    for tokens in lengths:
        for name, most in tokens_by_limit.items():
            answer_tokens = new_tokens - 1 if name == "the model's context" else 0
            if most is not None and tokens + answer_tokens > most:
                remedy = _remedy(name, most, answer_tokens, min(lengths))
                raise ConfigError(
                    f"lengths={tokens}{f' with new_tokens={new_tokens}' if answer_tokens else ''} is more than {name} of {most} "
                    f"tokens; {remedy}"
                )


def _remedy(name: str, most: int, answer: int, shortest: int) -> str:
    """Return the end of an error message: what to change if a prompt and its answer exceed a limit.

    most: tokens that the limit allows. answer: tokens of the answer that count. shortest: length of the shortest
    prompt.
    """
    if most - answer >= SHORTEST:
        return f"give lengths of at most {most - answer}"
    if not answer or most < SHORTEST + 2:
        return f"no prompt of {SHORTEST} tokens fits: give a larger {name.removeprefix('the ')}"
    if shortest + 2 <= most:  # a measured answer has at least three tokens, and the last one is not stored
        return f"give new_tokens of at most {most - shortest + 1}"
    return f"give new_tokens of at most {most - SHORTEST + 1}, and shorter lengths"
