"""The control that knows the answer: its kept sets against stock attention rows, its cost, its marks, its fallback."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.listeners import AnswerAttention
from mmkv_bench.compression.scorers.oracle import OracleScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation import forks
from mmkv_bench.generation.result import digest
from mmkv_bench.generation.unshared_generation import answer_of_full
from mmkv_bench.methods.build import READS_ANSWER, build_compressor
from mmkv_bench.plan.cells import build_methods, method_entries
from mmkv_bench.tables.build import build
from tests import cover, zoo
from tests.compression import oracles as layers
from tests.each import each
from tests.generation import common
from tests.oracles import oracle
from tests.tables.examples import Example, markdown

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")
TOKENS = 5


@functools.cache
def made(name: str = "oracle") -> Compressor:
    return build_compressor(name, method_defaults([name])[name], "paper")


@functools.cache
def stock(family: str):
    """A model of the zoo with stock eager attention, whose rows can be seen."""
    model = zoo.build(family)
    model.load_state_dict(zoo.model(family).state_dict())
    zoo.set_attention(model, "eager")
    return model.eval()


# ---------------------------------------------------------------- the sums


@each(("heads", "group"), [(2, 1), (1, 4), (2, 3)])
def test_the_mass_is_the_sum_of_the_rows_that_were_fed(heads, group):
    length, fed = 9, 4
    layer = layers.make_layer(length + fed, heads, group, seed=3)
    answer = AnswerAttention(length)
    for end in range(length + 1, length + fed + 1):  # one token at a time
        answer.add(
            0, layer.query[None, :, end - 1 : end].float(), layer.key[None, :, :end].float(), layer.scaling, None
        )
    rows = [
        torch.stack(
            [layers.attention(layer.query[h, i], layer.key[h // group], layer.scaling, i) for h in range(heads * group)]
        )
        for i in range(length, length + fed)
    ]
    expected = torch.tensor(oracle.mass(rows, length, heads), dtype=torch.float64)
    assert answer.steps == fed
    torch.testing.assert_close(answer.mass(0).double(), expected, atol=1e-6, rtol=1e-5)
    together = AnswerAttention(length)  # a question comes in one forward
    together.add(0, layer.query[None, :, length:].float(), layer.key[None].float(), layer.scaling, None)
    torch.testing.assert_close(together.mass(0), answer.mass(0), atol=1e-6, rtol=1e-5)
    assert together.steps == fed


def test_nothing_fed_is_no_mass_and_a_batch_is_refused():
    assert AnswerAttention(4).mass(0) is None
    with pytest.raises(UnsupportedError, match="one by one"):
        AnswerAttention(4).add(0, torch.zeros(2, 2, 1, 4), torch.zeros(2, 1, 5, 4), 0.5, None)


def test_one_prompt_without_padding_is_asked_for():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    padded = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"]).index_fill(1, torch.tensor([0]), 0)}
    for wrong in (padded, {name: torch.cat([value, value]) for name, value in inputs.items()}):
        with pytest.raises(UnsupportedError, match="one prompt without padding"):
            answer_of_full(model, wrong, max_new_tokens=2)


# ---------------------------------------------------------------- through models


@each("protocol", common.PROTOCOLS)
@cover.few("family", FAMILIES, keep=2, first=2)
def test_what_stays_is_what_stock_attention_rows_of_the_answer_say(family, protocol):
    model, prompt = zoo.model(family), common.encoded(family)
    length = prompt.length
    cut = common.context_cut(prompt, common.family(family)) if protocol == "query_agnostic" else length
    first = {"paper": length, "strict": length - 1, "query_agnostic": cut}[protocol]
    rules = common.rules(model, TOKENS, min_new_tokens=TOKENS)
    cells = [common.cell(made(), budget, protocol) for budget in (2, 7, cut // 2)]
    results = common.together(model, family, prompt, cells, rules)
    assert [result.n_tokens for result in results] == [TOKENS] * 3
    fed = oracle.rows(stock(family), dict(prompt.inputs), TOKENS, first)
    heads, strict = len(results[0].kept[0]), int(protocol == "strict")
    masses = [oracle.mass(rows, cut, heads) for rows in fed]
    for cell, result in zip(cells, results, strict=True):
        count = cell.budget.entries_for(cut) - strict
        expected = [
            torch.tensor([sorted(oracle.kept(head[: cut - strict], count)) for head in mass]).view(heads, count)
            for mass in masses
        ]
        assert result.kept_digest == digest(expected)
        assert result.fallback == [] and result.entries_resident == result.entries_asked


@pytest.mark.slow
@cover.few("tokens", [1, 4])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next"])
def test_forks_equal_runs_of_their_own_and_disturb_nobody(family, tokens):
    model, prompt = zoo.model(family), common.encoded(family)
    rules = common.rules(model, tokens)
    others = [common.cell(made("snapkv"), 12, p) for p in common.PROTOCOLS] + common.full_cells()
    cells = [common.cell(made(), budget, p) for p in common.PROTOCOLS for budget in (6, 12, prompt.length)]
    results = common.assert_forks_equal_alone(model, family, prompt, cells + others, rules)
    without = common.together(model, family, prompt, others, rules)
    common.assert_same(results[len(cells) :], without)


@pytest.mark.slow
def test_a_one_token_answer_under_paper_is_judged_by_the_last_query_and_says_so():
    family = "qwen2_5_vl"
    model, prompt = zoo.model(family), common.encoded(family)
    rules = common.rules(model, 1)
    cells = [common.cell(made(), 9, p) for p in common.PROTOCOLS]
    last = build_compressor(
        "last_query",
        compose(["method=last_query", "methods.last_query.recents=0"]).methods["last_query"],
        "paper",
        method_defaults(["last_query"])["last_query"],
    )
    for run in (common.together, common.alone):
        results = run(model, family, prompt, [*cells, common.cell(last, 9)], rules)
        assert [result.fallback for result in results] == [["oracle_no_answer_step"], [], [], []]
        assert results[0].kept_digest == results[3].kept_digest


def test_its_cost_holds_the_decoding_of_the_whole_answer(monkeypatch):
    family = "qwen2_5_vl"
    model, prompt = zoo.model(family), common.encoded(family)
    cells = [common.cell(made(), 9), common.cell(made("snapkv"), 9)]
    slow = forks.decode

    def late(*arguments, **options):
        time.sleep(0.3)
        return slow(*arguments, **options)

    monkeypatch.setattr(forks, "decode", late)
    ours, other = common.together(model, family, prompt, cells)
    assert ours.compress_s > 0.3 > other.compress_s
    (own,) = common.alone(model, family, prompt, cells[:1])
    assert own.compress_s > 0 and own.ttft_s > own.compress_s


@each("error", [RuntimeError("broken"), torch.OutOfMemoryError("full")])
def test_an_answer_that_fails_ends_only_the_cells_that_wanted_it(error, monkeypatch):
    family = "qwen2_5_vl"
    model, prompt = zoo.model(family), common.encoded(family)

    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr(forks, "decode", broken)
    cells = [common.cell(made(), 9), *common.full_cells(("paper",)), common.cell(made("snapkv"), 9)]
    ours, *others = common.together(model, family, prompt, cells)
    assert ours.status == ("oom" if "OutOfMemory" in type(error).__name__ else "error") and str(error) in ours.error
    assert [other.status for other in others] == ["ok", "ok"]
    monkeypatch.undo()
    common.assert_same(others, common.together(model, family, prompt, cells[1:]))


def test_any_scorer_may_ask_for_the_answer_and_only_those_that_ask_get_it():
    class Both(OracleScorer):
        def with_answer(self, score, mass):
            return score + mass

    class Unasking(WindowScorer):
        def with_answer(self, score, mass):
            raise AssertionError("not asked for")

    family = "qwen2_5_vl"
    parts = {part: getattr(made(), part) for part in ("allocator", "selector", "reducer")}
    cells = [common.cell(Compressor("both", Both(), **parts), 9), common.cell(Compressor("w", Unasking(), **parts), 9)]
    results = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    pure = common.together(zoo.model(family), family, common.encoded(family), [common.cell(made(), 9)])
    assert results[0].kept_digest != pure[0].kept_digest


def test_attach_without_an_answer_records_that_there_was_none():
    model, inputs = zoo.model("llama"), zoo.prompt("llama")
    with attach(model, made(), Budget.parse(6)) as session:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert session.listener.fallbacks == [("oracle_no_answer_step",)]


# ---------------------------------------------------------------- in rows and tables


def test_its_rows_say_that_it_cheats_and_defaults_are_not_tuned():
    config = compose(["method=[oracle,snapkv]"])
    methods = {m.name: m for m in build_methods(method_entries(config.method_config))}
    assert methods["oracle"].plain[READS_ANSWER] is True and not methods["oracle"].tuned
    assert READS_ANSWER not in methods["snapkv"].plain and READS_ANSWER not in methods["full"].plain


def test_tables_mark_the_ceiling_and_let_it_win_nothing():
    example = Example()
    example.add("full", None, [1.0] * 40)
    example.add("oracle", 64, [1.0] * 40, parameters={READS_ANSWER: True, "recents": 0})
    example.add("snapkv", 64, [1.0] * 20 + [0.0] * 20)
    example.add("random", 64, [0.0] * 40)
    (table,) = build(example.rows())
    assert table.best("64") == ("snapkv",)
    text = markdown([table])
    assert "| oracle (ceiling) | 1.00" in text and "**1.00**" not in text
    assert "oracle (ceiling): knows the full cache's own answer, so it is not compared" in text
