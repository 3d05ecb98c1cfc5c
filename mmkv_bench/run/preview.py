"""The facts of the card, gathered from configuration, cells, store and the first prompt of each dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmkv_bench import devices
from mmkv_bench.compression.budget import Budget
from mmkv_bench.models.threads import threads_for
from mmkv_bench.plan.identity import UNKNOWN
from mmkv_bench.run.card import BudgetLine, CardFacts, DatasetLine, PromptSize

if TYPE_CHECKING:
    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.plan.plan import Plan


def card_facts(
    plan: Plan,
    rows_done: Mapping[str, int],
    prompts: Mapping[str, PromptSize],
    loaded: LoadedModel | None,
    notes: Sequence[str] = (),
) -> CardFacts:
    """What `card.render` shows.

    Args:
        rows_done: dataset -> rows there already; prompts: first prompts, where known; loaded: the model, None when nothing
            needs it (its weights are then taken from the folder, and no device is looked for).
        notes: further ones than the plan's.
    """
    from mmkv_bench.families.facts import kv_bytes_per_token
    from mmkv_bench.models.source import Source

    config, cells = plan.config, plan.cells
    family = None if cells[0].dtype == UNKNOWN else plan.family
    source = Source.of(config.model)
    weights = source.stored_bytes()
    if loaded is not None:
        weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    first = next(iter(prompts.values()), None)
    budgets = list(dict.fromkeys(cell.budget for cell in cells if cell.budget is not None))
    length = first.context_tokens if first else 0
    return CardFacts(
        model=config.model.name,
        family=family.name if family else "",
        fingerprint=cells[0].model_fingerprint,
        layers=family.num_layers if family else 0,
        query_heads=family.num_query_heads if family else 0,
        kv_heads=family.num_kv_heads if family else 0,
        head_dim=family.head_dim if family else 0,
        dtype=cells[0].dtype,
        attention=config.model.attention,
        device=_device(loaded, config.model.threads) if loaded else "",
        weights_bytes=weights,
        weights=source.kind,
        kv_bytes_per_token=kv_bytes_per_token(family, cells[0].dtype) if family else 0,
        datasets=[
            DatasetLine(
                part.dataset, len(part.samples), len(part.cells), rows_done[part.dataset], prompts.get(part.dataset)
            )
            for part in plan.parts
        ],
        methods=list(dict.fromkeys(cell.method for cell in cells)),
        budgets=[BudgetLine(str(budget), _entries(budget, length)) for budget in budgets],
        protocols=config.protocol,
        readings=list(dict.fromkeys(cell.reading for cell in cells if cell.reading)),
        seeds=list(dict.fromkeys(cell.seed for cell in cells if cell.seed is not None)),
        out=str(plan.out),
        shard=str(config.shard),
        notes=[*plan.notes, *notes],
    )


def _device(loaded: LoadedModel, threads: int | None) -> str:
    if devices.at(loaded.device).kind != "cpu":
        return str(loaded.device)
    count = threads_for(loaded, threads)
    return f"{loaded.device} with {count} thread{'s' * (count > 1)}"


def _entries(budget: Budget, length: int) -> int:
    return budget.entries_for(length)
