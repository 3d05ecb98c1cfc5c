"""Promise: questions of one document that are decoded as one batch have the rows of questions asked one at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv_bench.compression.batched_layer import join
from mmkv_bench.compression.cache import CompressedCache, CompressedLayer
from mmkv_bench.compression.varlen_layer import VarlenLayer
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.fidelity import NOTHING, ExtraMeasures
from tests import zoo
from tests.core import parts
from tests.generation import common, faulty
from tests.generation.test_questions import NAMES, QUESTIONS, document, grid

TAILS = (9, 12, 7, 10)
SICK = 2
"""A question whose length no other has."""


def waiting(prompts, together: bool = True) -> list:
    """The prompts, of which each knows that all later ones will be asked too."""
    numbers = tuple(range(QUESTIONS)) if together else ()
    return [
        dataclasses.replace(one, document=dataclasses.replace(one.document, waiting=numbers[place + 1 :]))
        for place, one in enumerate(prompts)
    ]


def answered(name: str, prompts, cells, extras=NOTHING, **options) -> tuple[dict, list[int]]:
    """(question, cell) -> result, and the rows of every forward pass."""
    model, rows = zoo.model(name), []
    rules = common.rules(model, repetition_penalty=1.3, stop_strings=["bc", "da"])

    def count(module, args, given) -> None:
        rows.append((args[0] if args else given["input_ids"]).shape[0])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with Engine(model, common.family(name), rules, common.tokenizer(), **options) as engine:
            made = {
                (number, one.cell): one
                for number, prompt in enumerate(prompts)
                for one in engine.answer(prompt, cells, extras)
            }
    finally:
        hook.remove()
    return made, rows


def assert_equal(made: dict, wanted: dict) -> None:
    assert list(made) == list(wanted)
    common.assert_same(made.values(), wanted.values())


def some(*protocols: str) -> list:
    methods = ("window", "ragged", "h2o_decode", "full")
    return [one for one in grid(protocols) if one.cell.startswith(methods)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "known"), zip(NAMES, ("query_agnostic", "query_joint"), strict=True))
def test_questions_together_have_the_rows_of_one_at_a_time_with_measures_policies_and_stop_strings(name, known):
    prompts, extras = document(name, tails=TAILS), ExtraMeasures(fidelity=True, samples=True)
    cells = some(known, "query_paraphrase")
    apart, _ = answered(name, waiting(prompts, together=False), cells, extras)
    made, _ = answered(name, waiting(prompts), cells, extras)
    assert {one.error for one in made.values()} == {None}
    assert_equal(made, apart)
    assert len({len(one.token_ids) for one in made.values()}) > 1, "rows end at different steps"
    for (_, cell), one in made.items():
        method, rule = cell.split("/")
        acting, shared = method in ("full", "h2o_decode"), rule != "query_paraphrase"
        assert one.fork_rows == (1 if acting else 2 * (QUESTIONS if shared else 1)), cell


def test_a_batch_costs_one_pass_a_question_and_the_longest_answer():
    for name in NAMES:
        prompts = document(name, tails=TAILS)
        cells = [common.cell(parts.window(kind=kind), 12, "query_agnostic") for kind in ("uniform", "all_ragged")]
        made, rows = answered(name, waiting(prompts), cells)
        longest = max(len(one.token_ids) for one in made.values())
        assert rows[: 1 + QUESTIONS] == [1, *[len(cells)] * QUESTIONS]
        assert len(rows) == 1 + QUESTIONS + longest - 1
        _, apart = answered(name, waiting(prompts, together=False), cells)
        assert len(apart) == 1 + sum(
            max(len(made[number, cell.cell].token_ids) for cell in cells) for number in range(QUESTIONS)
        )
        _, few = answered(name, waiting(prompts), cells, fork_batch=3)
        assert max(few) == 3, "fork_batch bounds the rows"


@pytest.mark.slow
def test_a_question_that_fails_or_memory_for_few_rows_leaves_every_other_row_as_it_was():
    name = "qwen2_5_vl"
    prompts, model = document(name, tails=TAILS), zoo.model(name)
    cells = some("query_first")
    sick = common.cell(faulty.compressor("sick", reducer=faulty.FaultyReducer("nan_key")), 12, "query_first")
    wanted, _ = answered(name, waiting(prompts, together=False), cells)
    for when, error in (
        (lambda given: faulty.tokens(given) == TAILS[SICK], lambda: RuntimeError("broken, on purpose")),
        (lambda given: faulty.rows(given) > 2, faulty.oom),
    ):
        with faulty.failing(model, when, error) as raised:
            made, _ = answered(name, waiting(prompts), cells[:2] + [sick] + cells[2:])
        assert raised
        ended = {key: one.status for key, one in made.items() if key[1] == sick.cell}
        broken = {number for number in range(QUESTIONS) if error is not faulty.oom and number == SICK}
        assert ended == {(number, sick.cell): "error" if number in broken else "nan" for number in range(QUESTIONS)}
        left = {key: one for key, one in made.items() if key not in ended}
        assert {key[0] for key, one in left.items() if one.status != "ok"} == broken
        assert_equal(
            {key: one for key, one in left.items() if key[0] not in broken},
            {key: one for key, one in wanted.items() if key[0] not in broken},
        )


def test_a_step_on_fixed_storage_decodes_questions_together_as_the_model_does():
    name = "qwen2_5_vl"
    prompts, step = document(name, tails=TAILS), common.Seen(zoo.model(name))
    cells = [one for one in some("query_generic") if "h2o" not in one.cell]
    wanted, _ = answered(name, waiting(prompts, together=False), cells)
    made, _ = answered(name, waiting(prompts), cells, step=step)
    assert step.addresses
    assert_equal(made, wanted)


def test_joined_rows_of_questions_of_other_lengths_hold_what_each_held():
    """Padded on the left and back to back alike, before and after one more token of each row."""
    generator = torch.Generator().manual_seed(0)
    for kind in (CompressedLayer, VarlenLayer):
        layers = []
        for seen, widths in ((9, (2, 4)), (12, (5, 3))):
            rows = [(torch.randn(2, width, 4, generator=generator),) * 2 for width in widths]
            places = [torch.arange(width).expand(2, -1).clone() for width in widths]
            places[0][1, 0] = -1  # a head with one entry less
            layers.append(kind.from_rows([(*row, place) for row, place in zip(rows, places, strict=True)], seen, 3))
        wanted = [held for layer in layers for held in entries_of(layer)]
        joined = join([CompressedCache.of([layer]) for layer in layers], 2, stepwise=True).layers[0]
        assert type(joined) is kind and joined.seen == 12 and getattr(joined, "folded", True)
        new = torch.randn(4, 2, 1, 4, generator=generator)
        for held in (entries_of(joined), joined.update(new, new) and entries_of(joined)):
            assert all(torch.equal(one[: len(other)], other) for one, other in zip(held, wanted, strict=True))
        assert all(torch.equal(one[-1], new.flatten(0, 1)[row, 0]) for row, one in enumerate(held))


def entries_of(layer: CompressedLayer) -> list:
    """The keys of each row's heads, without padding."""
    places = layer.slot_positions()
    return [key[place >= 0] for key, place in zip(layer.keys.flatten(0, 1), places.flatten(0, 1), strict=True)]
