"""What every method promises, as checks of one composed method: `mmkv-bench check` runs them on a user's file with the
problems made up here, the registry's tests on every shipped method with problems of their own.

Seven look at its parts on made-up layers, two at whole answers of the embedded model. Each returns what is broken, or None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from mmkv_bench.compression.observation import Needs
from mmkv_bench.errors import ConfigError
from mmkv_bench.methods import toy_layers
from mmkv_bench.methods.toy_layers import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv_bench.compression.compressor import Compressor
    from mmkv_bench.compression.observation import Observation

PAGES = 2
IN_REDUCE = "key or value has changed in reduce"


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
    given = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    node = content("method", CUSTOM) | {"path": path, "name": given.pop("name", None), "args": given}
    return build_compressor(CUSTOM, node, "paper")


def scores(made: Compressor, seen: Sequence[Observation], budget: int, seed: int = 0) -> list[Tensor]:
    return [made.score(one, budget, seed) for one in seen]


def summaries(made: Compressor, seen: Sequence[Observation], budget: int, seed: int = 0) -> dict[int, Tensor]:
    found = {one.layer: made.summary(one, budget, seed) for one in seen}
    return {layer: summary for layer, summary in found.items() if summary is not None}


def select(made: Compressor, problem: Problem, seen: Sequence[Observation] | None = None) -> list[Tensor]:
    """What stays of an observed prompt: scored, summed up, divided and selected as a run does it."""
    seen, budget = problem.observe(made.needs) if seen is None else seen, problem.budget
    return divide(made, problem, seen, scores(made, seen, budget), summaries(made, seen, budget))


def divide(
    made: Compressor,
    problem: Problem,
    seen: Sequence[Observation],
    given: Sequence[Tensor],
    summed: Mapping[int, Tensor],
    strict: bool = False,
) -> list[Tensor]:
    layers, types = range(problem.layers), seen[0].token_types
    return made.select(given, problem.budget, types, layers, problem.layers, strict, summaries=summed)


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    import torch

    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------- promises
def scores_are_finite(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """scores are finite float32 (or float64), one per KV head and token"""
    for problem in problems or toy_layers.problems():
        seen = problem.observe(made.needs)
        found = scores(made, seen, problem.budget)  # which refuses other shapes and dtypes
        found += summaries(made, seen, problem.budget).values()
        if not all(bool(score.isfinite().all()) for score in found):
            return f"{problem}: NaN or infinity"
    return None


def the_budget_is_kept(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """exactly the budget is kept, or more or less where the method says so, also under strict"""
    for problem in problems or toy_layers.problems():
        seen, budget = problem.observe(made.needs), problem.budget
        given, summed = scores(made, seen, budget), summaries(made, seen, budget)
        heads, length = seen[0].key.shape[:2]
        for strict in (False, True):
            where = f"{problem}{' strict' * strict}"
            found = divide(made, problem, seen, given, summed, strict)
            if said := _miscounted(made, found, (budget - strict) * heads * problem.layers):
                return f"{where}: {said}"
            if {(len(found), index.shape[0], str(index.dtype)) for index in found} != {_rows(problem, heads)}:
                return f"{where}: indices of {[(tuple(index.shape), index.dtype) for index in found]}"
            for row in (row for index in found for row in index.tolist()):
                real = [j for j in row if j >= 0]
                ascending = real == sorted(set(real)) and row[len(row) - len(real) :] == real
                if not ascending or any(j >= length - strict for j in real):
                    return f"{where}: indices {row} do not ascend, repeat, or lie outside of the prompt"
    return None


def _rows(problem: Problem, heads: int) -> tuple[int, int, str]:
    return problem.layers, heads, "torch.int64"


def _miscounted(made: Compressor, found: Sequence[Tensor], asked: int) -> str | None:
    kept = sum(int((index >= 0).sum()) for index in found)
    wrong = (kept > asked and not made.exceeds) or (kept < asked and not made.falls_short)
    return f"{kept} entries where {asked} are asked for" if wrong else None


def nothing_is_remembered(
    made: Compressor,
    problems: Sequence[Problem] = (),
    disturb: Callable[[], object] | None = None,
    needs: Needs | None = None,
) -> str | None:
    """the same prompt keeps the same entries, whatever ran before and whatever torch drew"""
    disturb = disturb or partial(_another_prompt, made)
    for problem in problems or toy_layers.problems():
        first = select(made, problem)
        disturb()
        seen = problem.observe(needs or made.needs)
        if not all(_same(first, select(made, problem, seen)) for _ in range(2)):
            return f"{problem}: another selection the second time"
    return None


def _another_prompt(made: Compressor) -> None:
    import torch

    torch.rand(5)
    select(made, Problem(partial(toy_layers.prompt, 40, 2, 3, seed=9, identity="other"), 7, "another"))


def seeds_matter_only_if_declared(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """another seed changes the scores of a scorer that says stochastic=True, and of no other"""
    moved = []
    for problem in problems or toy_layers.problems():
        seen = problem.observe(made.needs)
        moved.append(not _same(*(scores(made, seen, problem.budget, seed) for seed in (0, 1))))
        if moved[-1] and not made.stochastic:
            return (
                f"{problem}: another seed gives other scores; write `stochastic = True` into the class {_class(made)}"
            )
    if made.stochastic and not any(moved):
        return f"no seed changes anything; take `stochastic = True` out of the class {_class(made)}"
    return None


def _class(made: Compressor) -> str:
    return type(made.scorer).__name__


def equal_keys_give_equal_scores(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """scorers with equal keys give equal scores: all parameters, and the budget if it matters, are in the key"""
    for problem in problems or [toy_layers.problem(shape, 12) for shape in toy_layers.SHAPES[3:]]:
        seen, budget = problem.observe(made.needs), problem.budget
        scorer, length = made.eviction.scorer, seen[0].length
        mine = _scored(made, seen, budget)
        for name, one in _neighbours(scorer):
            for other in (budget, 3):
                if one.key(other, length) == scorer.key(budget, length):
                    theirs = _scored(dataclasses.replace(made, scorer=one), seen, other)
                    if mine is not None and theirs is not None and not _same(mine, theirs):
                        missing = f"self.{name}" if name else "budget"
                        return (
                            f"scores differ with {missing}, and key returns {one.key(other, length)} for {scorer} at budget "
                            f"{budget} and for {one} at budget {other}; add {missing} to what it returns"
                        )
    return None


def _neighbours(scorer: Any) -> list[tuple[str, Any]]:
    """The scorer, and copies with one number changed, as far as it accepts them, with the number's name."""
    found = [("", scorer)]
    for field in dataclasses.fields(scorer) if dataclasses.is_dataclass(scorer) else ():
        value = getattr(scorer, field.name)
        changes: list[float] = [value + 2, value * 3] if isinstance(value, (int, float)) else []
        if isinstance(value, bool):
            changes = [not value]
        for change in changes:
            try:
                found.append((field.name, dataclasses.replace(scorer, **{field.name: change})))
            except Exception:  # noqa: BLE001, S112 - a value that the scorer refuses
                continue
    return found


def _scored(made: Compressor, seen: Sequence[Observation], budget: int) -> list[Tensor] | None:
    try:
        return scores(made, seen, budget)
    except Exception:  # noqa: BLE001 - a neighbour may need more than was gathered
        return None


def neighbours_change_nothing(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """the same entries stay whatever other methods and settings of a run gather, score and memoise beside it"""
    everything = Needs(64, *[True] * (len(vars(Needs())) - 1))
    for problem in problems or [toy_layers.problem(shape, shape[0] // 3) for shape in toy_layers.SHAPES[3:]]:
        alone = select(made, problem)
        seen = problem.observe(everything)
        for name, one in _neighbours(made.eviction.scorer)[1:]:
            _scored(dataclasses.replace(made, scorer=one), seen, problem.budget)
            if not _same(alone, select(made, problem, seen)):
                return f"{problem}: other entries stay beside the same method with another {name}"
        if not _same(alone, select(made, problem, seen)):
            return f"{problem}: other entries stay where other methods need more of the prompt"
    return None


def nothing_is_written_to(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """keys, values and scores are only read: other methods share them"""
    for problem in problems or toy_layers.problems():
        seen = problem.observe(made.needs)
        before = [(one.key.clone(), one.value.clone()) for one in seen]
        found = select(made, problem, seen)
        if not all(_same(pair, (one.key, one.value)) for pair, one in zip(before, seen, strict=True)):
            return f"{problem}: obs.key or obs.value has changed"
        for one, index in zip(seen, found, strict=True):
            made.eviction.reducer.reduce(one.key, one.value, index, one.token_types)
        if not all(_same(pair, (one.key, one.value)) for pair, one in zip(before, seen, strict=True)):
            return f"{problem}: {IN_REDUCE}"
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
    neighbours_change_nothing,
    nothing_is_written_to,
    seeds_matter_only_if_declared,
    equal_keys_give_equal_scores,
    answers_are_the_same_alone,
    a_budget_of_everything_is_full,
)
