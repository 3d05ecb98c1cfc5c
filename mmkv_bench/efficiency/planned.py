"""What `scenario=efficiency` measures: its cells, and the order of their passes; and what is refused before any work."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mmkv_bench import protocols
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.config.schema import as_list
from mmkv_bench.efficiency.prompts import SCHEME, TEXT
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.methods.compatibility import visual_parts
from mmkv_bench.models.families import family_of
from mmkv_bench.models.quiet import quiet_libraries
from mmkv_bench.models.source import RANDOM, Source
from mmkv_bench.plan import identity as identities
from mmkv_bench.plan.cells import Cell, DatasetIdentity, bases, expand
from mmkv_bench.plan.validate import validate_combinations

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
        notes: cells that are the same.
    """

    config: DictConfig
    cells: Sequence[Cell]
    units: Sequence[Unit]
    notes: Sequence[str]
    family: Family

    @property
    def out(self) -> Path:
        """The folder of its rows."""
        return Path(self.config.out).expanduser()

    def cell(self, name: str) -> Cell:
        """One of the cells by its hash."""
        return next(cell for cell in self.cells if cell.cell == name)

    @property
    def baselines(self) -> dict[str, str]:
        """Cell -> the cell of `full` under its protocol."""
        full = {cell.protocol: cell.cell for cell in self.cells if cell.compressor.is_full}
        return {cell.cell: full[cell.protocol] for cell in self.cells}


def planned(config: DictConfig) -> Planned:
    """The scenario's plan of a validated configuration; of the model its files are read, not its weights into memory.

    Raises:
        MMKVError: settings of other scenarios, methods that cannot be measured so, a length beyond the model's context.
    """
    _refuse_others(config)
    quiet_libraries()
    from omegaconf import OmegaConf

    config = config.copy()
    OmegaConf.set_struct(config, False)
    config.baseline, config.datasets = "full", {TEXT: {}}  # every ratio is to the full cache
    source = Source.of(config.model)
    described = source.described()
    family = family_of(described)
    generation = {"max_new_tokens": int(config.new_tokens), "ends": "length"}
    own = DatasetIdentity(f"scheme {SCHEME}", {"prompt": "text"}, generation)
    identity = replace(identities.gather(config, {}), datasets={TEXT: own})
    cells, notes = expand(config, identity, method_defaults(bases(config), tuple(config.folders)))
    validate_combinations(config, family, [cell.compressor for cell in cells])
    for cell in cells:
        _refuse_method(cell, source.kind == RANDOM)
    lengths = list(dict.fromkeys(as_list(config.lengths)))
    _refuse_long(config, lengths, family)
    units = order([cell.cell for cell in cells], lengths, config.repeats, config.order_seed)
    return Planned(config, cells, units, notes, family)


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
            "made-up text of lengths=[...] tokens; leave dataset out"
        )
    from omegaconf import OmegaConf

    for key, allowed in {"stage": "both", "shard": "0/1", "logger.kind": "none", "judge.kind": "none"}.items():
        if (given := OmegaConf.select(config, key)) != allowed:
            raise ConfigError(f"{key}={given} has no meaning under scenario=efficiency; leave it out")
    for name in as_list(config.protocol):
        rule = protocols.protocol(str(name))
        if rule.cuts or rule.prefills_again:
            raise UnsupportedError(
                f"protocol={name} is not timed by scenario=efficiency: its prompts are text without a question to cut off, "
                "and nobody serves a prompt that is prefilled twice; allowed: paper, strict"
            )


def _refuse_method(cell: Cell, random_weights: bool) -> None:
    """A method whose times here would be those of something else."""
    made = cell.compressor
    if made.needs.answer:
        raise UnsupportedError(
            f"method {cell.method} reads the full cache's own answer before it compresses, so it has no latency of its own; "
            "leave it out of scenario=efficiency"
        )
    if made.needs_visual or visual_parts(made):
        raise UnsupportedError(
            f"method {cell.method} needs visual tokens and the prompts of scenario=efficiency are text; leave it out"
        )
    if random_weights and made.allocator is not None and made.allocator.follows_prompt:
        raise UnsupportedError(
            f"method {cell.method} divides its budget by what the weights make of the prompt ({type(made.allocator).__name__}), "
            "and random weights would time another division; give real weights (model.weights=<folder>), or leave it out"
        )


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
