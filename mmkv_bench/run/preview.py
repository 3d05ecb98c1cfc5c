"""The facts of the card, gathered from configuration, cells, store and the first prompt of each dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mmkv_bench.compression.budget import Budget
from mmkv_bench.config.schema import as_list
from mmkv_bench.plan.identity import resolve_device
from mmkv_bench.run.card import BudgetLine, CardFacts, DatasetLine, PromptSize

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.models.load import LoadedModel
    from mmkv_bench.plan.cells import Cell


def card_facts(
    config: DictConfig,
    cells: Sequence[Cell],
    samples: Mapping[str, int],
    rows_done: Mapping[str, int],
    prompts: Mapping[str, PromptSize],
    loaded: LoadedModel | None,
    out: str,
    notes: Sequence[str],
) -> CardFacts:
    """What `card.render` shows.

    Args:
        samples: dataset -> samples of this run; rows_done: dataset -> rows there already; prompts: first prompts, where
            known; loaded: the model, None when nothing needs it (its weights are then taken from the folder).
    """
    from mmkv_bench.models.families import family_of, kv_bytes_per_token
    from mmkv_bench.models.source import Source

    source = Source.of(config.model)
    model = source.hf_config()
    family = family_of(model)
    weights = source.stored_bytes()
    if loaded is not None:
        weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    first = next(iter(prompts.values()), None)
    budgets = list(dict.fromkeys(cell.budget for cell in cells if cell.budget is not None))
    length = first.context_tokens if first else 0
    return CardFacts(
        model=config.model.name,
        family=family.name,
        fingerprint=cells[0].model_fingerprint,
        layers=family.num_layers,
        query_heads=family.num_query_heads,
        kv_heads=family.num_kv_heads,
        head_dim=family.head_dim,
        dtype=cells[0].dtype,
        attention=config.model.attention,
        device=str(loaded.device) if loaded else resolve_device(config.model.device),
        weights_bytes=weights,
        weights=source.kind,
        kv_bytes_per_token=kv_bytes_per_token(model, cells[0].dtype),
        datasets=[
            DatasetLine(
                label,
                samples[label],
                sum(cell.dataset == label for cell in cells),
                rows_done[label],
                prompts.get(label),
            )
            for label in samples
        ],
        methods=list(dict.fromkeys(cell.method for cell in cells)),
        budgets=[BudgetLine(str(budget), _entries(budget, length)) for budget in budgets],
        protocols=as_list(config.protocol),
        readings=list(dict.fromkeys(cell.reading for cell in cells if cell.reading)),
        seeds=list(dict.fromkeys(cell.seed for cell in cells if cell.seed is not None)),
        out=out,
        shard=str(config.shard),
        notes=list(notes),
    )


def _entries(budget: Budget, length: int) -> int:
    return budget.entries_for(length)
