"""What every method promises, as checks of one composed method; `python -m mmkv_bench check` runs them on a file.

Six look at its parts on made-up layers, two at whole answers of the embedded model. Each returns what is broken, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.observation import Observation

LAYERS = 3
SHAPES = ((1, 2, 1), (2, 1, 2), (3, 2, 2), (17, 2, 1), (40, 2, 3), (130, 1, 4))
"""(prompt tokens, KV heads, query heads per KV head) of the made-up prompts."""
PAGES = 2
_DIM, _WIDTH = 8, 12


def method(path: str, settings: Sequence[str] = ()) -> Compressor:
    """The compressor of `method=custom` with this file.

    Args:
        settings: `name=<class>` and constructor arguments, `<argument>=<value>`.

    Raises:
        ConfigError: the file cannot be used, or a word is no setting.
    """
    from omegaconf import OmegaConf

    from mmkv_bench.config.files import content
    from mmkv_bench.methods.build import CUSTOM, build_compressor

    for word in settings:
        if "=" not in word:
            raise ConfigError(
                f"{word!r} is no setting; allowed: name=<class> and <argument>=<value> of the constructor"
            )
    given = OmegaConf.from_dotlist(list(settings))
    node = OmegaConf.create(content("method", CUSTOM))
    node.path, node.name = path, given.pop("name", None)
    node.args = given
    return build_compressor(CUSTOM, node, "paper")


# ---------------------------------------------------------------- made-up layers
def prompt(
    length: int, heads: int, group: int, made: Compressor, seed: int = 0, identity: str = "x"
) -> list[Observation]:
    """Observations of `LAYERS` layers with random weights, as a prefill would give them: an image inside text."""
    import torch
    from torch import nn

    from mmkv_bench.compression.numerics.rotary import rotate
    from mmkv_bench.compression.observation import Chunk, Observation

    def rope(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * 100.0 ** (-torch.arange(_DIM // 2, dtype=torch.float64) / (_DIM // 2))
        angle = torch.cat([angle, angle], -1)
        return angle.cos().float(), angle.sin().float()

    layers = []
    for layer in range(LAYERS):
        stream = torch.Generator().manual_seed(1000 * seed + layer)
        hidden = torch.randn(length, _WIDTH, generator=stream)
        weights = [torch.randn(n * _DIM, _WIDTH, generator=stream) * 0.4 for n in (heads * group, heads, heads)]
        query, key, value = ((hidden @ weight.T).unflatten(-1, (-1, _DIM)).transpose(0, 1) for weight in weights)
        cos, sin = rope(torch.arange(length))
        types = torch.zeros(length, dtype=torch.int64)
        types[length // 4 : length // 4 + max(1, length // 2)] = 1
        layers.append(
            Observation(
                layer,
                LAYERS,
                made.needs,
                scaling=_DIM**-0.5,
                length=length,
                token_types=types,
                project_query=lambda h, weight=weights[0]: (h @ weight.T).unflatten(-1, (-1, _DIM)).transpose(0, 1),
                future_rope=lambda offsets: rope(offsets + length - 1),
                identity=identity,
                module=nn.Identity(),
            )
        )
        layers[-1].observe(Chunk(rotate(query, cos, sin), rotate(key, cos, sin), value, hidden, cos, sin))
    return layers


def problems() -> list[tuple[tuple[int, int, int], int]]:
    """Shapes with a budget each: one entry, two, a third, all but one."""
    found = [(shape, budget) for shape in SHAPES for budget in {1, 2, shape[0] // 3, shape[0] - 1}]
    return sorted((shape, budget) for shape, budget in found if 0 < budget < shape[0])


def scores(made: Compressor, seen: Sequence[Observation], budget: int, seed: int = 0) -> list[Tensor]:
    return [made.score(one, budget, seed) for one in seen]


def select(
    made: Compressor, seen: Sequence[Observation], budget: int, strict: bool = False, seed: int = 0
) -> list[Tensor]:
    length = seen[0].length
    key = made.allocator.summary_key(budget, length)
    summaries = {} if key is None else {one.layer: made.allocator.summary(one, budget, seed) for one in seen}
    made_scores = scores(made, seen, budget, seed)
    return made.select(made_scores, budget, seen[0].token_types, range(LAYERS), LAYERS, strict, summaries=summaries)


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    import torch

    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _at(shape: tuple[int, int, int], budget: int) -> str:
    length, heads, group = shape
    return f"{length} tokens, {heads} KV heads, {heads * group} query heads, budget {budget}"


# ---------------------------------------------------------------- promises
def scores_are_finite(made: Compressor) -> str | None:
    """scores are finite float32 (or float64), one per KV head and token"""
    for shape, budget in problems():
        found = scores(made, prompt(*shape, made), budget)
        if not all(bool(score.isfinite().all()) for score in found):
            return f"{_at(shape, budget)}: NaN or infinity"
    return None


def the_budget_is_kept(made: Compressor) -> str | None:
    """exactly the budget is kept, or less where the method says so, also under strict"""
    for shape, budget in problems():
        for strict in (False, True):
            found = select(made, prompt(*shape, made), budget, strict)
            kept = sum(int((index >= 0).sum()) for index in found)
            asked = (budget - strict) * shape[1] * LAYERS
            if kept > asked or (kept < asked and not made.falls_short):
                return f"{_at(shape, budget)}{' strict' if strict else ''}: {kept} entries where {asked} are asked for"
            for row in (row for index in found for row in index.tolist()):
                real = [j for j in row if j >= 0]
                if (
                    real != sorted(set(real))
                    or any(j >= shape[0] - strict for j in real)
                    or row[len(row) - len(real) :] != real
                ):
                    return f"{_at(shape, budget)}: indices {row} do not ascend, repeat, or lie outside of the prompt"
    return None


def nothing_is_remembered(made: Compressor) -> str | None:
    """the same prompt keeps the same entries, whatever ran before and whatever torch drew"""
    import torch

    for shape, budget in problems():
        first = select(made, prompt(*shape, made), budget)
        torch.rand(5)
        select(made, prompt(40, 2, 3, made, seed=9, identity="other"), 7)
        if not _same(first, select(made, prompt(*shape, made), budget)):
            return f"{_at(shape, budget)}: another selection the second time; draw from obs.generator, keep no state"
    return None


def seeds_matter_only_if_declared(made: Compressor) -> str | None:
    """another seed changes the scores only of a scorer that says stochastic=True"""
    if made.stochastic:
        return None
    for shape, budget in problems():
        if not _same(scores(made, prompt(*shape, made), budget, 0), scores(made, prompt(*shape, made), budget, 1)):
            return f"{_at(shape, budget)}: set stochastic=True"
    return None


def equal_keys_give_equal_scores(made: Compressor) -> str | None:
    """scorers with equal keys give equal scores: all parameters, and the budget if it matters, are in the key"""
    for length, heads, group in SHAPES[3:]:
        for one in _neighbours(made.scorer):
            for budget in (3, 12):
                if one.key(budget, length) == made.scorer.key(12, length):
                    seen = prompt(length, heads, group, made)
                    mine, other = (_scored(scorer, seen, b) for scorer, b in ((made.scorer, 12), (one, budget)))
                    if mine is not None and other is not None and not _same(mine, other):
                        return (
                            f"{made.scorer} at budget 12 and {one} at budget {budget} share {one.key(budget, length)}"
                        )
    return None


def _neighbours(scorer: Any) -> list[Any]:
    """The scorer, and copies with one number changed, as far as it accepts them."""
    import dataclasses

    found = [scorer]
    for field in dataclasses.fields(scorer) if dataclasses.is_dataclass(scorer) else ():
        value = getattr(scorer, field.name)
        if isinstance(value, bool):
            changes = [not value]
        else:
            changes = [value + 2, value * 3] if isinstance(value, (int, float)) else []
        for change in changes:
            try:
                found.append(dataclasses.replace(scorer, **{field.name: change}))
            except Exception:  # noqa: BLE001, S112 - a value that the scorer refuses
                continue
    return found


def _scored(scorer: Any, seen: Sequence[Observation], budget: int) -> list[Tensor] | None:
    try:
        return [scorer.score(one, budget, 0) for one in seen]
    except Exception:  # noqa: BLE001 - a neighbour may need more than was gathered
        return None


def nothing_is_written_to(made: Compressor) -> str | None:
    """keys, values and scores are only read: other methods share them"""
    for shape, budget in problems():
        seen = prompt(*shape, made)
        before = [(one.key.clone(), one.value.clone()) for one in seen]
        found = select(made, seen, budget)
        for one, index in zip(seen, found, strict=True):
            made.reducer.reduce(one.key, one.value, index, one.token_types)
        if not all(_same(pair, (one.key, one.value)) for pair, one in zip(before, seen, strict=True)):
            return f"{_at(shape, budget)}: obs.key or obs.value has changed"
    return None


def answers_are_the_same_alone(made: Compressor) -> str | None:
    """on the embedded model, shared forks equal runs of their own through stock generate(), token for token"""
    return _through_the_model(made, (16, 64))


def a_budget_of_everything_is_full(made: Compressor) -> str | None:
    """a budget of the whole prompt is the full cache"""
    return _through_the_model(made, (10**6,))


def _through_the_model(made: Compressor, budgets: Sequence[int]) -> str | None:
    from mmkv_bench.compression.budget import Budget
    from mmkv_bench.compression.compressor import full
    from mmkv_bench.generation.engine import Engine
    from mmkv_bench.generation.result import CellSpec
    from mmkv_bench.generation.single import run_alone
    from mmkv_bench.protocols import NAMES, protocol

    model, family, rules, tokenizer, pages = _embedded()
    names = [name for name in NAMES if not protocol(name).diagnostic]
    cells = [CellSpec(f"{p}@{b}", made, Budget.parse(b), p) for p in names for b in budgets]
    baseline = [CellSpec(f"full/{p}", full(), None, p) for p in names]
    with Engine(model, family, rules, tokenizer) as engine:
        together = [engine.answer(page, [*cells, *baseline]) for page in pages]
    for page, results in zip(pages, together, strict=True):
        for number, (cell, shared) in enumerate(zip(cells, results[: len(cells)], strict=True)):
            own = run_alone(model, family, rules, tokenizer, page, cell)
            if "ok" not in (shared.status, own.status) or shared.status != own.status:
                return f"{cell.cell}: {shared.error or own.error}"
            if (shared.token_ids, shared.kept_digest) != (own.token_ids, own.kept_digest):
                return f"{cell.cell}: shared {shared.token_ids}, alone {own.token_ids}"
            whole = results[len(cells) + number // len(budgets)]
            if cell.keeps_all(shared.context_tokens) and shared.token_ids != whole.token_ids:
                return f"{cell.cell}: {shared.token_ids}, full {whole.token_ids}"
    return None


@cache
def _embedded() -> tuple[Any, Any, Any, Any, list[Any]]:
    """The embedded model, its family, rules and tokenizer, and `PAGES` encoded pages."""
    from PIL import Image
    from transformers.utils.logging import disable_progress_bar

    from mmkv_bench.config.schema import resolve_path
    from mmkv_bench.generation.encode import encode
    from mmkv_bench.generation.rules import DecodeRules
    from mmkv_bench.models.load import load_model
    from mmkv_bench.tiny.pages import TASKS, make_page

    disable_progress_bar()
    loaded = load_model("tiny", resolve_path("pkg://mmkv_bench/tiny/weights"), device="cpu")
    pages = []
    for kind in list(TASKS)[:PAGES]:
        _, turn, images = make_page(kind, "small", "train", 0)
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": turn.question}]
        shown = [Image.fromarray(image) for image in images]
        pages.append(encode(loaded.processor, loaded.family, kind, [{"role": "user", "content": content}], shown))
    rules = DecodeRules.read(loaded.model.generation_config, {"max_new_tokens": 8}, loaded.tokenizer)
    return loaded.model, loaded.family, rules, loaded.tokenizer, pages


CHECKS: tuple[Callable[[Any], str | None], ...] = (
    scores_are_finite,
    the_budget_is_kept,
    nothing_is_remembered,
    seeds_matter_only_if_declared,
    equal_keys_give_equal_scores,
    nothing_is_written_to,
    answers_are_the_same_alone,
    a_budget_of_everything_is_full,
)
