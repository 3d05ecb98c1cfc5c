"""SparseMM: budgets by head scores against exact fractions, by hand, and through models; its combination with others."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.head_pool import HeadPool
from mmkv_bench.compression.allocators.head_scores import HeadScores
from mmkv_bench.compression.allocators.pyramid import Pyramid
from mmkv_bench.compression.compressor import Compressor, OverBudgetError
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import method_defaults
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.compression import oracles
from tests.core import parts
from tests.each import each
from tests.generation import common
from tests.oracles import sparsemm as oracle

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl")
COMBINED = {"mmshift_sparsemm": HeadScores, "mmshift_pyramidkv": Pyramid, "mmshift_adakv": HeadPool}
many = settings(max_examples=cover.examples(200), deadline=None, derandomize=True)

tables = st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 7])).flatmap(
    lambda shape: st.tuples(
        st.just(shape[1]),
        st.lists(
            st.lists(
                st.one_of(st.sampled_from([0.0, 1.0, 2.5]), st.floats(0, 50, width=16)),
                min_size=shape[1] * shape[2],
                max_size=shape[1] * shape[2],
            ),
            min_size=shape[0],
            max_size=shape[0],
        ),
    )
)


def artefact(table: list[list[float]], kv_heads: int) -> dict:
    return {"scores": table, "kv_heads": kv_heads}


def zoo_table(family: str, seed: int = 0) -> dict:
    """Scores of a zoo model: a few heads of all have most of the mass, and some have none."""
    heads, kv_heads = zoo.HEADS, common.family(family).num_kv_heads
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(zoo.LAYERS, heads, generator=g, dtype=torch.float64).pow(4)
    table[0, :2] = 0
    return artefact([[round(score, 6) for score in row] for row in table.tolist()], kv_heads)


def shipped(name: str = "sparsemm", reading: str = "paper", data: dict | None = None, **parameters) -> Compressor:
    node = copy.deepcopy(method_defaults([name])[name])
    for key, value in parameters.items():
        node[key] = value
    made = build_compressor(name, node, reading)
    return made if data is None else replace(made, allocator=replace(made.allocator, calibration=data))


# ---------------------------------------------------------------- budgets


@many
@given(
    problem=tables,
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    window=st.sampled_from([0, 1, 8, 32]),
    rho_min=st.sampled_from(["0", "0.1", "0.25", "1"]),
    mode=st.sampled_from([("redistribute", "remainder"), ("drop", "remainder"), ("drop", "nearest")]),
)
def test_caps_equal_the_formula(problem, n, share, window, rho_min, mode):
    kv_heads, table = problem
    budget = 1 + int(share * (n + 4))  # 1 .. T + 5
    allocator = HeadScores(artefact(table, kv_heads), window, float(rho_min), surplus=mode[0], rounding=mode[1])
    got = allocator.caps([torch.zeros(kv_heads, n)] * len(table), budget, range(len(table)), len(table))
    assert all(cap.dtype == torch.int64 and cap.device.type == "cpu" for cap in got)
    caps = [cap.tolist() for cap in got]
    assert caps == oracle.caps(table, kv_heads, budget, n, window, Fraction(rho_min), *mode)
    alone = [allocator.caps([torch.zeros(kv_heads, n)], budget, [i], len(table))[0].tolist() for i in range(len(table))]
    assert alone == caps, "no layer waits for another"
    for layer, row in enumerate(caps):
        assert 0 <= sum(row) <= kv_heads * allocator.allowance(budget, n, [layer], len(table)) < sum(row) + kv_heads


@many
@given(problem=tables, n=st.integers(1, 300), share=st.floats(0, 1), window=st.sampled_from([0, 8, 32]))
def test_the_model_holds_exactly_the_budget(problem, n, share, window):
    kv_heads, table = problem
    if not any(map(any, table)):
        return
    budget, allocator = 1 + int(share * (n + 4)), HeadScores(artefact(table, kv_heads), window)
    caps = allocator.model_caps(budget, n, len(table), kv_heads)
    assert sum(map(sum, caps)) == min(budget, n) * kv_heads * len(table)
    assert max(map(max, caps)) <= n
    assert allocator.allowance(budget, n, range(len(table)), len(table)) == min(budget, n) * len(table)
    w = min(window, max(1, budget // 2), n) if window else 0
    assert min(map(min, caps)) >= min(n, w + (budget - w) // 10), "every head gets its window and its floor"


@each(
    ("table", "kv_heads", "budget", "caps"),
    [
        # w 4, base 16, r 1.6, 57.6 to divide by scores 1, 3, 0, 4 (sum over two query heads each)
        ([[0, 1, 2, 1], [0, 0, 4, 0]], 2, 20, [[13, 27], [6, 34]]),  # 12.8, 27.2, 5.6, 34.4
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 2, 20, [[20, 20], [20, 20]]),
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 4, 3, [[3, 3, 3, 3], [3, 3, 3, 3]]),
        ([[1, 0, 0, 0], [0, 0, 0, 0]], 2, 1, [[1, 1], [1, 1]]),  # all of C = 1 is window
        ([[1, 0, 0, 0], [0, 0, 0, 0]], 2, 2, [[5, 1], [1, 1]]),  # w 1, base 1: 0.1 each, 3.6 to the first
        # all zero: r + w, the sum 6.4 of the floors rounded down; the rest of the budget is not used
        ([[0, 0, 0, 0], [0, 0, 0, 0]], 2, 20, [[6, 6], [5, 5]]),
    ],
)
def test_caps_by_hand(table, kv_heads, budget, caps):
    allocator = HeadScores(artefact(table, kv_heads), window=4)
    assert allocator.model_caps(budget, 1000, 2, kv_heads) == caps


def test_what_may_fall_short_is_declared():
    zero, some = artefact([[0.0, 0.0]], 2), artefact([[0.0, 1.0]], 2)
    assert HeadScores(zero).falls_short and HeadScores(some, surplus="drop").falls_short
    assert not HeadScores(some).falls_short and not HeadScores(zero, scores="random").falls_short
    assert not HeadScores("auto").falls_short and not HeadScores(some, surplus="drop").exceeds
    assert HeadScores(some, surplus="drop", rounding="nearest").exceeds


def test_the_floor_is_counted_once():
    """Equation 14 of the paper adds r to a term that contains it: the total would be r * L * Hkv above the budget."""
    caps = HeadScores(artefact([[1, 2], [3, 4]], 2), window=0).model_caps(100, 10**6, 2, 2)
    assert caps == [[46, 82], [118, 154]]
    assert sum(map(sum, caps)) == 400


def test_the_score_of_a_kv_head_is_the_sum_over_its_query_heads_and_not_the_best_or_the_mean_of_few():
    one = HeadScores(artefact([[9, 0, 0, 5, 4, 0]], 2), window=0).model_caps(40, 10**4, 1, 2)
    assert one == [[40, 40]]


def test_what_a_head_cannot_take_goes_to_the_others_or_nowhere():
    table = artefact([[8, 1], [1, 0]], 2)
    # window 4, base 16, r 1.6: 57.6 by tenths -> 47.68, 7.36, 7.36, 1.6 beside the window, and 20 is the most.
    # Of the 44 that the first leaves, 7.36 : 7.36 : 1.6 makes 19.84, 19.84, 4.31.
    assert HeadScores(table, 4).model_caps(20, 24, 2, 2) == [[24, 24], [24, 8]]
    assert HeadScores(table, 4, surplus="drop").model_caps(20, 24, 2, 2) == [[24, 11], [11, 6]]
    # As released a tenth of 16 is 1: 60 by tenths are 48, 6, 6 and 0 beside it and the window.
    assert HeadScores(table, 4, surplus="drop", rounding="nearest").model_caps(20, 24, 2, 2) == [[24, 11], [11, 5]]


def test_the_released_floor_is_a_whole_number_of_entries():
    """C = 64, w = 32: a tenth of 32 is 3, and 29 * 8 + 3 + 32 = 267 to the one head with a score; exactly it is 266."""
    table = artefact([[1, 0, 0, 0], [0, 0, 0, 0]], 4)
    released = HeadScores(table, surplus="drop", rounding="nearest")
    assert released.model_caps(64, 1000, 2, 4) == [[267, 35, 35, 35], [35, 35, 35, 35]]
    assert HeadScores(table).model_caps(64, 1000, 2, 4)[0][0] == 266
    made = shipped("sparsemm", "released", table)
    assert (made.version, shipped("sparsemm", "paper", table).version) == (2, 1)


def test_released_rounding_may_exceed_the_budget_and_is_refused_outside_of_the_released_reading():
    table = artefact([[1.0] * 5 + [1.2] * 3], 8)
    scores, total = [torch.rand(8, 90)], {}
    for reading in ("paper", "released"):
        made = shipped("sparsemm", reading, table)
        total[reading] = sum(int((index >= 0).sum()) for index in made.select(scores, 11, None, [0], 1))
    assert total["paper"] == 88
    assert 88 < total["released"] <= 88 + 4
    with pytest.raises(OverBudgetError):
        replace(shipped("sparsemm", "released", table), reading="paper").select(scores, 11, None, [0], 1)


def test_random_scores_depend_on_their_own_seed_and_on_nothing_else():
    table, other = artefact([[1.0, 0.0], [0.0, 5.0]], 2), artefact([[7.0, 7.0], [0.0, 0.0]], 2)
    caps = HeadScores(table, scores="random", draw=3).model_caps(100, 500, 2, 2)
    torch.rand(3)
    assert HeadScores(other, scores="random", draw=3).model_caps(100, 500, 2, 2) == caps
    assert HeadScores(table, scores="random", draw=4).model_caps(100, 500, 2, 2) != caps
    assert sum(map(sum, caps)) == 400


def test_uniform_scores_are_snapkv_and_read_no_calibration():
    scores = [torch.rand(2, 80) for _ in range(3)]
    uniform = shipped(scores="uniform")
    snapkv = shipped("snapkv")
    assert uniform.scorer == snapkv.scorer and uniform.selector == snapkv.selector
    for budget in (1, 7, 33, 79):
        ours, theirs = (made.select(scores, budget, None, range(3), 3) for made in (uniform, snapkv))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not HeadScores.needs_calibration({"scores": "uniform"}) and HeadScores.needs_calibration({})


@each(
    ("made", "message"),
    [
        (lambda: HeadScores(window=-1), "window is -1; allowed: 0 or more"),
        (lambda: HeadScores(rho_min=1.5), "rho_min is 1.5; allowed"),
        (lambda: HeadScores(scores="calibrate"), "did you mean 'calibrated'"),
        (lambda: HeadScores(surplus="keep"), "allowed: drop, redistribute"),
        (lambda: HeadScores(rounding="nearest"), "allowed: rounding=remainder, or surplus=drop"),
        (lambda: HeadScores({"scores": [[1.0, 2.0], [1.0]], "kv_heads": 1}), "not a table of head scores"),
        (lambda: HeadScores({"scores": [[1.0, 2.0, 3.0]], "kv_heads": 2}), "kv_heads, which divides the rows"),
        (lambda: HeadScores({"scores": [], "kv_heads": 2}), "not a table of head scores"),
        (lambda: HeadScores({"kv_heads": 2}), "not a table of head scores"),
        (lambda: HeadScores({"scores": [[1.0, -2.0]], "kv_heads": 2}), "a score that is not a number of 0 or more"),
        (lambda: HeadScores({"scores": [[1.0, float("nan")]], "kv_heads": 2}), "a score that is not a number"),
        (lambda: HeadScores("auto").model_caps(4, 9, 1), "no head scores .calibration='auto'.*calibrate sparsemm"),
        (
            lambda: HeadScores(artefact([[1.0, 2.0]], 2)).model_caps(4, 9, 3, 2),
            "has 1 layers of 2 KV heads, but this model has 3 of 2; calibrate this model",
        ),
        (lambda: HeadScores(artefact([[1.0, 2.0]], 2)).model_caps(4, 9, 1, 1), "this model has 1 of 1"),
    ],
)
def test_what_makes_no_sense_is_refused(made, message):
    with pytest.raises(ConfigError, match=message):
        made()


# ---------------------------------------------------------------- the method


def test_one_window_parameter_reaches_scorer_allocator_and_selector():
    made = shipped(window=16)
    assert made.scorer == WindowScorer(16, 5)
    assert (made.allocator.window, made.selector.window) == (16, 16)
    assert shipped(reading="released").allocator == HeadScores("auto", surplus="drop", rounding="nearest")


def wanted(made: Compressor, scores: list[torch.Tensor], table: dict, budget: int, strict: bool, last: int):
    """Per layer and head: the last `last` tokens of the prompt that are candidates, then the best others."""
    n, granted = scores[0].shape[1] - int(strict), budget - int(strict)
    caps = oracle.caps(table["scores"], table["kv_heads"], granted, n, made.allocator.window)
    protected = [j >= scores[0].shape[1] - last for j in range(n)]
    return [oracles.select(score[:, :n], cap, protected) for score, cap in zip(scores, caps, strict=True)]


def rows_of(kept: list[torch.Tensor]) -> list[list[list[int]]]:
    return [[[j for j in row if j >= 0] for row in index.tolist()] for index in kept]


class Seen:
    """A listener that scores every layer as the method does and compresses nothing."""

    def __init__(self, made: Compressor, budget: int):
        self.made, self.budget, self.needs, self.scores = made, budget, made.needs, []

    def layer_done(self, prompt, layer, observations):
        self.scores.append(self.made.scorer.score(observations[0], self.budget, 0))

    def prompt_done(self, prompt):
        pass

    def kept(self):
        return []


def scores_of(model, inputs, made: Compressor, budget: int) -> list[torch.Tensor]:
    from mmkv_bench.compression.session import Session

    seen = Seen(made, budget)
    with Session(model, seen), torch.no_grad():
        model(**inputs, use_cache=True)
    return seen.scores


@each("strict", [False, True])
@each("share", [8, 3, 1.5])
@cover.few("family", FAMILIES, keep=2, first=2)
def test_kept_sets_of_a_model_are_the_oracles(family, share, strict):
    model, inputs, table = zoo.model(family), zoo.prompt(family), zoo_table(family)
    length = inputs["input_ids"].shape[1]
    made, budget = shipped(data=table), int(length / share)
    with attach(model, made, parts.budget(budget), "strict" if strict else "paper") as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept = session.kept()
    window = min(32, max(1, budget // 2))
    got = rows_of([index[0] for index in kept])
    assert got == wanted(made, scores_of(model, inputs, made, budget), table, budget, strict, window)
    sizes = {len(row) for rows in got for row in rows}
    assert len(sizes) > 1, "this model's heads do not tell the budgets apart"


@cover.few("family", FAMILIES, keep=2, first=2)
def test_decoding_equals_full_attention_with_the_evicted_entries_masked(family):
    model, inputs = zoo.model(family), zoo.prompt(family)
    length = inputs["input_ids"].shape[1]
    with attach(model, shipped(data=zoo_table(family)), parts.budget("25%")) as session:
        run = reference.generate(model, inputs, 6)
        kept = session.kept()
    masked = reference.masked_generate(model, inputs, reference.keep_of(kept, length), length, 6)
    assert (run.logits - masked.logits).abs().max() <= 2e-6
    assert torch.equal(run.tokens, masked.tokens)


@pytest.mark.full
@cover.few("family", FAMILIES, first=1)
def test_forks_answer_as_the_method_alone(family):
    table = zoo_table(family)
    variants = [shipped(data=table), shipped(data=table, scores="random"), shipped("sparsemm", "released", table)]
    variants = [replace(made, name=f"sparsemm{i}") for i, made in enumerate(variants)]
    cells = [
        common.cell(made, budget, protocol)
        for made in variants
        for budget in (1, 9, "40%")
        for protocol in common.PROTOCOLS
    ]
    forks = common.assert_forks_equal_alone(zoo.model(family), family, common.encoded(family), cells)
    assert len({fork.kept_digest for fork in forks}) > len(cells) // 3


def test_a_model_of_another_shape_is_a_row_with_the_sentence():
    family = "qwen2_5_vl"
    wrong = artefact([[1.0] * 8] * (zoo.LAYERS + 1), 2)
    (result,) = common.together(
        zoo.model(family), family, common.encoded(family), [common.cell(shipped(data=wrong), 9)]
    )
    assert (
        result.status == "error" and "calibration has 4 layers of 2 KV heads, but this model has 3 of 2" in result.error
    )


# ---------------------------------------------------------------- MM-ShiftKV's table 3: scores of ours, budgets of theirs


@pytest.mark.slow
@each("name", COMBINED)
def test_combinations_take_scores_and_selection_of_one_method_and_the_budgets_of_the_other(name):
    base, ours = shipped(name.removeprefix("mmshift_")), shipped("mmshift")
    for reading in ("paper", "released"):
        made = shipped(name, reading)
        assert isinstance(made.allocator, COMBINED[name]) and made.allocator == base.allocator
        assert made.scorer == shipped("mmshift", reading).scorer and isinstance(made.scorer, MMShiftScorer)
        assert made.selector == ours.selector, "the base method's window is not kept"


@each("strict", [False, True])
@cover.few("family", FAMILIES, keep=2, first=2)
def test_mmshift_with_sparsemm_budgets_keeps_the_best_votes_of_every_head(family, strict):
    model, inputs, table = zoo.model(family), zoo.prompt(family), zoo_table(family, 5)
    made = shipped("mmshift_sparsemm", data=table, samples=24, groups=4)
    with attach(model, made, parts.budget(13), "strict" if strict else "paper") as session, torch.no_grad():
        model(**inputs, use_cache=True)
        kept = session.kept()
    scores = scores_of(model, inputs, made, 13)
    assert rows_of([index[0] for index in kept]) == wanted(made, scores, table, 13, strict, 1)


def test_calibration_errors_are_configuration_errors():
    assert issubclass(CalibrationError, ConfigError)
