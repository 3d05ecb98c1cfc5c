"""What `scenario=efficiency` measures: its cells, and the order of their passes; and what is refused before any work."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmkv_bench import protocols
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import as_list
from mmkv_bench.efficiency.kinds import DATASETS, SCHEMES, kind_of, refuse_blind, refuse_textual
from mmkv_bench.errors import CalibrationError, ConfigError, UnsupportedError
from mmkv_bench.methods.compatibility import visual_parts
from mmkv_bench.models.families import family_of
from mmkv_bench.models.quiet import quiet_libraries
from mmkv_bench.models.source import RANDOM, Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, DatasetIdentity, Identity, bases, expand
from mmkv_bench.plan.validate import validate_combinations
from mmkv_bench.store.store import Store

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.efficiency.profiles import Profile
    from mmkv_bench.models.families import Family


class Unit(NamedTuple):
    """One pass of one cell over a prompt of `tokens`; `repeat` is None for the pass that counts memory."""

    cell: str
    tokens: int
    batch: int
    repeat: int | None


@dataclass(frozen=True)
class Planned:
    """What is measured.

    Attributes:
        cells: `full` first under each protocol; units: in the order in which they run.
        notes: cells that are the same, and whose division of the budget others were given.
        profiles: cell -> the stored division that was imposed on it.
    """

    config: DictConfig
    cells: Sequence[Cell]
    units: Sequence[Unit]
    notes: Sequence[str]
    family: Family
    profiles: Mapping[str, Profile] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """The folder of its rows."""
        return Path(self.config.out).expanduser()

    def cell(self, name: str) -> Cell:
        """One of the cells by its hash."""
        return next(cell for cell in self.cells if cell.cell == name)

    @property
    def baselines(self) -> dict[str, str]:
        """Cell -> the cell of `full` for its kind of prompts under its protocol."""
        full = {(cell.dataset, cell.protocol): cell.cell for cell in self.cells if cell.compressor.is_full}
        return {cell.cell: full[cell.dataset, cell.protocol] for cell in self.cells}


def planned(config: DictConfig, outline: bool = False) -> Planned:
    """The scenario's plan of a validated configuration; of the model its files are read, not its weights into memory.

    Args:
        outline: only as far as it is known without a connection, as `plan.plan.outline`.

    Raises:
        MMKVError: settings of other scenarios, methods that cannot be measured so, a length beyond the model's context.
    """
    _refuse_others(config)
    quiet_libraries()
    from omegaconf import OmegaConf

    config = config.copy()
    OmegaConf.set_struct(config, False)
    kinds = list(dict.fromkeys(as_list(config.prompts)))
    # every ratio is to the full cache
    config.baseline, config.datasets = "full", {DATASETS[kind]: {} for kind in kinds}
    source = Source.of(config.model)
    described = source.outlined()[0] if outline else source.described()
    if described is None:
        raise ConfigError(
            f"a plan of scenario=efficiency needs the shape of {config.model.name}, and its files are not here; allowed: a model "
            "of conf/model, or one that was fetched; choose such a one"
        )
    family = family_of(described)
    generation = {"max_new_tokens": int(config.new_tokens), "ends": "length"}
    own = {DATASETS[kind]: DatasetIdentity(f"scheme {SCHEMES[kind]}", {"prompt": kind}, generation) for kind in kinds}
    stored = Store(Path(config.out).expanduser()).cells() if outline else None
    known = identities.gather(config, {}) if stored is None else identities.outline(config, {}, stored)
    cells, notes = _expanded(config, replace(known, datasets=own), outline)
    for kind in kinds:
        refuse_blind(kind, family)
    validate_combinations(config, family, [cell.compressor for cell in cells])
    for cell in cells:
        _refuse_method(cell)
    cells, profiles = _profiled(config, cells, source.kind == RANDOM, family)
    lengths = list(dict.fromkeys(as_list(config.lengths)))
    _refuse_long(config, lengths, family)
    units = order([cell.cell for cell in cells], lengths, config.repeats, config.order_seed)
    notes += [f"{cell.label} divides its budget as {profiles[cell.cell]}" for cell in cells if cell.cell in profiles]
    return Planned(config, cells, units, notes, family, profiles)


def _expanded(config: DictConfig, identity: Identity, outline: bool) -> tuple[list[Cell], list[str]]:
    """Cells and notes; of an outline also those of methods whose calibration is not here."""
    defaults = method_defaults(bases(config), tuple(config.folders))
    try:
        return expand(config, identity, defaults)
    except CalibrationError as error:
        if not outline:
            raise
        cells, notes = expand(config, identity, defaults, calibrated=False)
        return cells, [*notes, str(error)]


def order(cells: Sequence[str], lengths: Sequence[int], repeats: int, seed: int) -> list[Unit]:
    """All passes: first those that count memory, which also show what runs out of it; then repeat after repeat, each with all
    cells and lengths in an order of its own, so that what drifts meets all of them alike."""
    draw = random.Random(f"order/{seed}")
    units = []
    for repeat in (None, *range(repeats)):
        block = [Unit(cell, tokens, 1, repeat) for cell, tokens in product(cells, lengths)]
        draw.shuffle(block)
        units += block
    return units


def _refuse_others(config: DictConfig) -> None:
    """Settings that mean something to runs that ask datasets, and nothing here."""
    if list(config.datasets) != ["pages"]:
        raise ConfigError(
            f"scenario=efficiency asks no dataset and got dataset={','.join(map(str, config.datasets))}: its prompts are "
            "made up, prompts=text, image or video of lengths=[...] tokens; leave dataset out"
        )
    from omegaconf import OmegaConf

    for key, allowed in {"stage": "both", "shard": "0/1", "logger.kind": "none", "judge.kind": "none"}.items():
        if (given := OmegaConf.select(config, key)) != allowed:
            raise ConfigError(f"{key}={given} has no meaning under scenario=efficiency; leave it out")
    for name in as_list(config.protocol):
        rule = protocols.protocol(str(name))
        if rule.cuts or rule.prefills_again:
            raise UnsupportedError(
                f"protocol={name} is not timed by scenario=efficiency: its passes prefill a prompt whole and once, as a "
                "server does; allowed: paper, strict"
            )


def _refuse_method(cell: Cell) -> None:
    """A method whose times here would be those of something else."""
    made = cell.compressor
    if made.needs.answer:
        raise UnsupportedError(
            f"method {cell.method} reads the full cache's own answer before it compresses, so it has no latency of its own; "
            "leave it out of scenario=efficiency"
        )
    if made.needs_visual or visual_parts(made):
        refuse_textual(kind_of(cell.dataset), cell.method)


def _profiled(
    config: DictConfig, cells: Sequence[Cell], random_weights: bool, family: Family
) -> tuple[list[Cell], dict[str, Profile]]:
    """The cells, of which those that divide by the prompt divide as rows of real prompts did where weights are random.

    Returns:
        They, and cell -> what was imposed on it.

    Raises:
        UnsupportedError: random weights, such a method, and no rows; ConfigError: rows that nothing takes.
    """
    from mmkv_bench.efficiency.profiles import imposed

    found, profiles = [], {}
    for cell in cells:
        allocator = cell.compressor.allocator
        if not random_weights or allocator is None or not allocator.follows_prompt:
            found.append(cell)
            continue
        if config.profiles is None:
            raise UnsupportedError(
                f"method {cell.method} divides its budget by what the weights make of the prompt ({type(allocator).__name__}), "
                "and random weights would time another division; allowed: profiles=<folder of its rows of real prompts>, or "
                "real weights (model.weights=<folder>); give one, or leave it out"
            )
        cell, profile = imposed(cell, str(config.profiles), family)
        profiles[cell.cell] = profile
        found.append(cell)
    if config.profiles is not None and not profiles:
        raise ConfigError(
            f"profiles={config.profiles} is taken by no method of this run: random weights and a method that divides its "
            "budget by the prompt take one; leave it out"
        )
    return found, profiles


def _refuse_long(config: DictConfig, lengths: Sequence[int], family: Family) -> None:
    limits = {"the model's context": family.max_context, "model.max_prompt_tokens": config.model.max_prompt_tokens}
    for tokens in lengths:
        for name, most in limits.items():
            answer = config.new_tokens - 1 if name == "the model's context" else 0
            if most is not None and tokens + answer > most:
                raise ConfigError(
                    f"lengths={tokens}{f' with new_tokens={config.new_tokens}' if answer else ''} is more than {name} of {most} "
                    f"tokens; give lengths of at most {most - answer}"
                )
