"""The promises of every method, as checks of one composed method.

`mmkv-bench check` runs the checks on a user's file with the problems of `toy_layers`. The tests run them on every
shipped method with problems of their own. Seven checks test the method's parts on random layers, two test whole answers
of the embedded model. A check takes the method, `made`, and, if it tests parts, prompts of random layers, `problems`.
It returns what is broken, or None. The first line of its docstring is the promise, which users see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor, full
from mmkv_bench.compression.observation import Needs, Observation
from mmkv_bench.config.files import content
from mmkv_bench.config.schema import Model, resolve_path
from mmkv_bench.config.shorthand import CUSTOM
from mmkv_bench.errors import ConfigError
from mmkv_bench.generation.encode import encode
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.result import CellSpec
from mmkv_bench.generation.rules import DecodeRules
from mmkv_bench.generation.unshared_generation import run_alone
from mmkv_bench.methods import toy_layers
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.methods.toy_layers import Problem
from mmkv_bench.models.load import load_model, quiet_transformers
from mmkv_bench.protocols import NAMES, protocol
from mmkv_bench.tiny.pages import TASKS, make_page

PAGES = 2
IN_REDUCE = "key or value has changed in reduce"


def method(path: str, settings: Sequence[str] = ()) -> Compressor:
    """Build the compressor of `method=custom` with this file.

    settings: `name=<class>` and constructor arguments, `<argument>=<value>`.

    Raises:
        ConfigError: the file cannot be used, or a setting has no `=`.
    """
    from omegaconf import OmegaConf

    for word in settings:
        if "=" not in word:
            raise ConfigError(
                f"{word!r} is not a setting; allowed: name=<class> and <argument>=<value> of the constructor"
            )
    arguments = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    node = content("method", CUSTOM) | {"path": path, "name": arguments.pop("name", None), "args": arguments}
    return build_compressor(CUSTOM, node, "paper")


def scores(made: Compressor, layers: Sequence[Observation], budget: int, seed: int = 0) -> list[Tensor]:
    return [made.score(layer, budget, seed) for layer in layers]


def summaries(made: Compressor, layers: Sequence[Observation], budget: int, seed: int = 0) -> dict[int, Tensor]:
    all_layers = {layer.layer: made.summary(layer, budget, seed) for layer in layers}
    return {number: summary for number, summary in all_layers.items() if summary is not None}


def select(made: Compressor, problem: Problem, layers: Sequence[Observation] | None = None) -> list[Tensor]:
    """Return the kept indices per layer that a run would select for an observed prompt.

    layers: an observation per layer; None: those of the problem.
    """
    layers, budget = problem.observe(made.needs) if layers is None else layers, problem.budget
    return _select_from_scores(made, problem, layers, scores(made, layers, budget), summaries(made, layers, budget))


def _select_from_scores(
    made: Compressor,
    problem: Problem,
    layers: Sequence[Observation],
    layer_scores: Sequence[Tensor],
    layer_summaries: Mapping[int, Tensor],
    strict: bool = False,
) -> list[Tensor]:
    numbers, types = range(problem.layers), layers[0].token_types
    return made.select(layer_scores, problem.budget, types, numbers, problem.layers, strict, summaries=layer_summaries)


def _same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---------------------------------------------------------------- parts
def scores_are_finite(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """scores are finite float32 (or float64), one per KV head and token"""
    for problem in problems or toy_layers.problems():
        layers = problem.observe(made.needs)
        values = scores(made, layers, problem.budget)  # which refuses other shapes and dtypes
        values += summaries(made, layers, problem.budget).values()
        if not all(bool(value.isfinite().all()) for value in values):
            return f"{problem}: NaN or infinity"
    return None


def the_budget_is_kept(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """exactly the budget is kept, or more or less if the method says so, also under strict"""
    for problem in problems or toy_layers.problems():
        layers, budget = problem.observe(made.needs), problem.budget
        layer_scores, layer_summaries = scores(made, layers, budget), summaries(made, layers, budget)
        heads, length = layers[0].key.shape[:2]
        for strict in (False, True):
            kept_indices = _select_from_scores(made, problem, layers, layer_scores, layer_summaries, strict)
            fault = _count_fault(made, kept_indices, (budget - strict) * heads * problem.layers)
            fault = fault or _form_fault(kept_indices, problem.layers, heads, length - strict)
            if fault:
                return f"{problem}{' strict' * strict}: {fault}"
    return None


def _count_fault(made: Compressor, kept: Sequence[Tensor], budget: int) -> str | None:
    count = sum(int((index >= 0).sum()) for index in kept)
    is_wrong = (count > budget and not made.exceeds) or (count < budget and not made.falls_short)
    return f"{count} entries instead of {budget}" if is_wrong else None


def _form_fault(kept: Sequence[Tensor], layers: int, heads: int, candidates: int) -> str | None:
    """Return how the kept indices are malformed, or None: per layer int64, ascending after the padding, below `candidates`."""
    if {(len(kept), index.shape[0], index.dtype) for index in kept} != {(layers, heads, torch.int64)}:
        return f"indices of {[(tuple(index.shape), index.dtype) for index in kept]}"
    for row in (row for index in kept for row in index.tolist()):
        valid_indices = [j for j in row if j >= 0]
        is_ascending = (
            valid_indices == sorted(set(valid_indices)) and row[len(row) - len(valid_indices) :] == valid_indices
        )
        if not is_ascending or any(j >= candidates for j in valid_indices):
            return f"indices {row} do not ascend, repeat, or lie outside of the prompt"
    return None


def nothing_is_remembered(
    made: Compressor,
    problems: Sequence[Problem] = (),
    disturb: Callable[[], object] | None = None,
    needs: Needs | None = None,
) -> str | None:
    """the same prompt keeps the same entries, whatever ran before and whatever torch drew

    disturb: called between two selections; None: another prompt is selected from. needs: statistics to gather for the second
    and third selection; None: the method's.
    """
    disturb = disturb or partial(_another_prompt, made)
    for problem in problems or toy_layers.problems():
        first_kept = select(made, problem)
        disturb()
        layers = problem.observe(needs or made.needs)
        if not all(_same(first_kept, select(made, problem, layers)) for _ in range(2)):
            return f"{problem}: the second run selects other entries"
    return None


def _another_prompt(made: Compressor) -> None:
    torch.rand(5)
    select(made, Problem(partial(toy_layers.prompt, 40, 2, 3, seed=9, identity="other"), 7, "another"))


def seeds_matter_only_if_declared(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """another seed changes the scores of a scorer that says stochastic=True, and of no other"""
    name, scores_changed = type(made.scorer).__name__, False
    for problem in problems or toy_layers.problems():
        layers = problem.observe(made.needs)
        changes_here = not _same(*(scores(made, layers, problem.budget, seed) for seed in (0, 1)))
        if changes_here and not made.stochastic:
            return f"{problem}: another seed gives other scores; write `stochastic = True` into the class {name}"
        scores_changed = scores_changed or changes_here
    if made.stochastic and not scores_changed:
        return f"no seed changes anything; take `stochastic = True` out of the class {name}"
    return None


def equal_keys_give_equal_scores(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """scorers with equal keys give equal scores: all parameters, and the budget if it matters, are in the key"""
    for problem in problems or [toy_layers.problem(shape, 12) for shape in toy_layers.SHAPES[3:]]:
        layers, budget = problem.observe(made.needs), problem.budget
        scorer, length = made.eviction.scorer, layers[0].length
        own_scores = _scores_or_none(made, layers, budget)
        for name, neighbour in _neighbours(scorer):
            for other in (budget, 3):
                if neighbour.key(other, length) != scorer.key(budget, length):
                    continue
                neighbour_scores = _scores_or_none(dataclasses.replace(made, scorer=neighbour), layers, other)
                if own_scores is not None and neighbour_scores is not None and not _same(own_scores, neighbour_scores):
                    missing = f"self.{name}" if name else "budget"
                    return (
                        f"scores differ with {missing}, and key returns {neighbour.key(other, length)} for {scorer} at budget "
                        f"{budget} and for {neighbour} at budget {other}; add {missing} to what it returns"
                    )
    return None


def _neighbours(scorer: Any) -> list[tuple[str, Any]]:
    """Return ("", the scorer), then (parameter, copy of the scorer with this parameter changed) for changes it accepts."""
    copies = [("", scorer)]
    for field in dataclasses.fields(scorer) if dataclasses.is_dataclass(scorer) else ():
        value = getattr(scorer, field.name)
        changes: list[float] = [value + 2, value * 3] if isinstance(value, (int, float)) else []
        for change in [not value] if isinstance(value, bool) else changes:
            try:
                copies.append((field.name, dataclasses.replace(scorer, **{field.name: change})))
            except Exception:  # noqa: BLE001, S112 - a value that the scorer refuses
                continue
    return copies


def _scores_or_none(made: Compressor, layers: Sequence[Observation], budget: int) -> list[Tensor] | None:
    try:
        return scores(made, layers, budget)
    except Exception:  # noqa: BLE001 - a neighbour may need more than was gathered
        return None


def neighbours_change_nothing(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """the same entries stay, whatever other methods and settings of a run gather, score and memoise"""
    all_needs = Needs(64, *[True] * (len(vars(Needs())) - 1))
    for problem in problems or [toy_layers.problem(shape, shape[0] // 3) for shape in toy_layers.SHAPES[3:]]:
        kept_alone = select(made, problem)
        layers = problem.observe(all_needs)
        for name, neighbour in _neighbours(made.eviction.scorer)[1:]:
            _scores_or_none(dataclasses.replace(made, scorer=neighbour), layers, problem.budget)
            if not _same(kept_alone, select(made, problem, layers)):
                return f"{problem}: other entries stay beside the same method with another {name}"
        if not _same(kept_alone, select(made, problem, layers)):
            return f"{problem}: other entries stay if other methods need more of the prompt"
    return None


def nothing_is_written_to(made: Compressor, problems: Sequence[Problem] = ()) -> str | None:
    """keys, values and scores are only read: other methods share them"""
    for problem in problems or toy_layers.problems():
        layers = problem.observe(made.needs)
        copies = [(layer.key.clone(), layer.value.clone()) for layer in layers]
        kept = select(made, problem, layers)
        if not all(_same(pair, (layer.key, layer.value)) for pair, layer in zip(copies, layers, strict=True)):
            return f"{problem}: obs.key or obs.value has changed"
        for layer, index in zip(layers, kept, strict=True):
            made.eviction.reducer.reduce(layer.key, layer.value, index, layer.token_types)
        if not all(_same(pair, (layer.key, layer.value)) for pair, layer in zip(copies, layers, strict=True)):
            return f"{problem}: {IN_REDUCE}"
    return None


# ---------------------------------------------------------------- whole answers
def answers_are_the_same_alone(made: Compressor) -> str | None:
    """on the embedded model, shared forks equal runs of their own through stock generate(), token for token"""
    return _through_the_model(made, (16, 64))


def a_budget_of_everything_is_full(made: Compressor) -> str | None:
    """a budget of the whole prompt is the full cache"""
    return _through_the_model(made, (10**6,))


def _through_the_model(made: Compressor, budgets: Sequence[int]) -> str | None:
    model, family, rules, tokenizer, pages = _embedded()
    protocol_names = [name for name in NAMES if not (protocol(name).diagnostic or protocol(name).streams)]
    cells = [CellSpec(f"{p}@{b}", made, Budget.parse(b), p) for p in protocol_names for b in budgets]
    baseline = [CellSpec(f"full/{p}", full(), None, p) for p in protocol_names]
    with Engine(model, family, rules, tokenizer) as engine:
        shared_results = [engine.answer(page, [*cells, *baseline]) for page in pages]
    for page, results in zip(pages, shared_results, strict=True):
        for number, (cell, shared) in enumerate(zip(cells, results[: len(cells)], strict=True)):
            single_results = run_alone(model, family, rules, tokenizer, page, cell)
            if "ok" not in (shared.status, single_results.status) or shared.status != single_results.status:
                return f"{cell.cell}: {shared.error or single_results.error}"
            if (shared.token_ids, shared.kept_digest) != (single_results.token_ids, single_results.kept_digest):
                return f"{cell.cell}: shared {shared.token_ids}, alone {single_results.token_ids}"
            full_result = results[len(cells) + number // len(budgets)]
            if cell.keeps_all(shared.context_tokens) and shared.token_ids != full_result.token_ids:
                return f"{cell.cell}: {shared.token_ids}, full {full_result.token_ids}"
    return None


@cache
def _embedded() -> tuple[Any, Any, Any, Any, list[Any]]:
    """Return (model, facts of its family, decoding rules, tokenizer, `PAGES` encoded pages) of the embedded model."""
    quiet_transformers()
    loaded = load_model(Model(name="tiny", device="cpu"), resolve_path("pkg://mmkv_bench/tiny/weights"))
    pages = []
    for kind in list(TASKS)[:PAGES]:
        _, turn, images = make_page(kind, "small", "train", 0)
        message = [{"type": "image"} for _ in images] + [{"type": "text", "text": turn.question}]
        pictures = [Image.fromarray(image) for image in images]
        messages = [{"role": "user", "content": message}]
        pages.append(encode(loaded.processor, loaded.family, kind, messages, pictures, replays=True))
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
