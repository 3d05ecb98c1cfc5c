"""Senseless combinations of parts are refused with reason and remedy; every other combination really runs."""

from __future__ import annotations

import ast
import functools
import inspect
import random
import re
from dataclasses import replace

import pytest
import torch

from mmkv_bench.compression.allocators.compensation import Compensation
from mmkv_bench.compression.allocators.head_pool import HeadPool
from mmkv_bench.compression.allocators.hybrid import HeadClasses, Hybrid
from mmkv_bench.compression.allocators.keep_all import KeepAll
from mmkv_bench.compression.allocators.positive import PositiveOnly
from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.compression.allocators.pyramid import Pyramid
from mmkv_bench.compression.allocators.spectral import Spectral
from mmkv_bench.compression.allocators.uniform import Uniform
from mmkv_bench.compression.allocators.uniform_model import UniformModel
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.decoding.heavy_hitters import HeavyHitters
from mmkv_bench.compression.decoding.kivi import KIVI
from mmkv_bench.compression.decoding.retrieval import ChunkRetrieval
from mmkv_bench.compression.decoding.sliding import Sliding
from mmkv_bench.compression.observation import Needs
from mmkv_bench.compression.reducers.evict import Evict
from mmkv_bench.compression.reducers.lookm_merge import LookMMerge
from mmkv_bench.compression.reducers.position_merge import PositionMerge
from mmkv_bench.compression.scorers.blind import BlindScorer
from mmkv_bench.compression.scorers.column_sums import ColumnSumScorer
from mmkv_bench.compression.scorers.deviation import DeviationScorer
from mmkv_bench.compression.scorers.keydiff import KeyDiffScorer
from mmkv_bench.compression.scorers.layer_mean import LayerMeanScorer
from mmkv_bench.compression.scorers.mmshift import MMShiftScorer
from mmkv_bench.compression.scorers.random import RandomScorer
from mmkv_bench.compression.scorers.recency import RecencyScorer
from mmkv_bench.compression.scorers.tail_mass import TailMassScorer
from mmkv_bench.compression.scorers.text_prior import TextPriorScorer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.modality_quota import ModalityQuota
from mmkv_bench.compression.selectors.one_set import OneSet
from mmkv_bench.compression.selectors.recent_share import RecentShare
from mmkv_bench.compression.selectors.text_first import TextFirst
from mmkv_bench.compression.selectors.text_recents import TextRecents
from mmkv_bench.compression.selectors.topk import TopK
from mmkv_bench.config.compose import compose, method_defaults
from mmkv_bench.errors import CompatibilityError, ConfigError
from mmkv_bench.methods import part_rules
from mmkv_bench.methods.build import build_compressor
from mmkv_bench.methods.part_rules import objections, refuse, visual_parts
from tests.compression import oracles
from tests.compression.test_registry import NAMES, method, types_of
from tests.each import each

LAYERS = 3


def made(scorer=None, allocator=None, selector=None, reducer=None, decoding=None, reading="paper") -> Compressor:
    parts = (scorer or WindowScorer(8), allocator or Uniform(), selector or TopK(), reducer or Evict())
    return Compressor("mine", *parts, reading, decoding)


RELEASED_MERGE = LookMMerge(sources="misaligned")

REFUSED = [
    (Compressor("mine", decoding=Sliding()), "the method full"),
    (Compressor("mine", reducer=PositionMerge()), "allowed: the reducer Evict"),
    (made(allocator=KeepAll()), "such as Uniform, or no scorer"),
    (made(allocator=KeepAll(), decoding=KIVI(), reading="released"), "WindowScorer"),
    (made(allocator=Uniform(excess=32)), "or reading=released"),
    (made(allocator=Pyramid(step="floored")), "Pyramid(window=32, beta=20, step='floored'"),
    (made(allocator=HeadPool(rounding="nearest")), "may keep more than the budget"),
    (made(ColumnSumScorer(), selector=TextRecents(rule="all_text")), "TextRecents"),
    (made(RecencyScorer(), HeadPool()), "the allocator Uniform"),
    (made(RandomScorer(), HeadPool()), "scorers of attention, votes or keys"),
    (made(LayerMeanScorer(), HeadPool()), "do not tell heads apart"),
    (made(BlindScorer(), HeadPool()), "BlindScorer"),
    (made(KeyDiffScorer(), HeadPool(normalize=True)), "normalize=false"),
    (made(KeyDiffScorer(), selector=ModalityQuota()), "the selector TopK"),
    (
        made(LayerMeanScorer("permutation"), selector=ModalityQuota()),
        "gives negative scores",
    ),
    (made(KeyDiffScorer(), Prefix(mode="online")), "mode=offline"),
    (made(BlindScorer(), PositiveOnly(), TopK(recents=1)), "recents=0"),
    (made(BlindScorer(), PositiveOnly(), RecentShare()), "the allocator Uniform"),
    (made(WindowScorer(32), Pyramid(window=16), TopK(window=32)), "window of 16 tokens"),
    (made(WindowScorer(8), selector=TopK(window=32)), "keeps one of 32"),
    (made(ColumnSumScorer(), Pyramid(), OneSet()), "the allocator UniformModel"),
    (made(ColumnSumScorer(), Uniform(), OneSet()), "layer by layer"),
    (made(TailMassScorer(8), Compensation(proxies=32)), "the same number of proxies in both"),
    (made(DeviationScorer(0.2), Spectral(0.3)), "the same filter in both"),
    (made(TextPriorScorer(), HeadPool(), reducer=RELEASED_MERGE), "HeadPool grants heads"),
    (made(decoding=HeavyHitters()), "allowed: ColumnSumScorer"),
    (
        made(TextPriorScorer(), selector=RecentShare(), decoding=HeavyHitters()),
        "have another unit",
    ),
    (made(ColumnSumScorer(), selector=TopK(), decoding=HeavyHitters()), "TopK none"),
    (
        made(ColumnSumScorer(), selector=RecentShare(share=0.3), decoding=HeavyHitters(0.5)),
        "RecentShare with the same share",
    ),
    (made(RecencyScorer(), selector=TopK(sinks=4), decoding=Sliding(sinks=1)), "keeps 4 sinks"),
    (made(decoding=ChunkRetrieval()), "both, or neither"),
    (made(allocator=Hybrid()), "both, or neither"),
    (made(allocator=Hybrid(chunk=4), decoding=ChunkRetrieval()), "chunks of 4 tokens"),
    (
        made(allocator=Hybrid(HeadClasses(0.5)), decoding=ChunkRetrieval(HeadClasses(0.9))),
        "the same `heads` in both",
    ),
    (
        made(allocator=Hybrid(), reducer=LookMMerge(), decoding=ChunkRetrieval()),
        "would count twice",
    ),
]


@each(("compressor", "words"), REFUSED)
def test_a_senseless_combination_is_refused_with_reason_and_remedy(compressor, words):
    with pytest.raises(CompatibilityError) as refused:
        refuse(compressor)
    message = str(refused.value)
    assert message.startswith("mine: ") and words in message and "allowed: " in message and "\n" not in message
    assert len([*objections(compressor)]) == 1, "one rule objects"
    assert isinstance(refused.value, ConfigError)


def test_every_rule_is_shown_refusing():
    """A rule is the line of a `yield`, at which the generator of a refused compressor waits."""
    shown = set()
    for compressor, _ in REFUSED:
        rules = objections(compressor)
        next(rules)
        shown.add(rules.gi_yieldfrom.gi_frame.f_lineno)
    tree = ast.parse(inspect.getsource(part_rules))
    assert shown == {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Yield)}


@each(
    "compressor",
    [
        Compressor("full"),
        made(allocator=Uniform(excess=32), reading="released"),
        made(KeyDiffScorer(), HeadPool(window=0)),
        made(BlindScorer(), PositiveOnly(), TopK(recents=0)),
        made(WindowScorer(32), Pyramid(window=32), TopK(window=32)),
        made(MMShiftScorer(), Pyramid(window=32), TopK(recents=1)),
        made(ColumnSumScorer(), UniformModel(), OneSet()),
        made(TailMassScorer(8), Compensation(proxies=8), ModalityQuota()),
        made(KeyDiffScorer(), Compensation(proxies=8)),
        made(ColumnSumScorer(), selector=RecentShare(), decoding=HeavyHitters()),
        made(TextPriorScorer(prior=False), selector=RecentShare(), decoding=HeavyHitters()),
        made(RecencyScorer(), selector=TopK(sinks=1), decoding=Sliding()),
        made(DeviationScorer(0.2), Spectral(0.3, dba=False)),
        made(KeyDiffScorer(), Prefix(calibration="auto")),
        made(TextPriorScorer(), Pyramid(), reducer=RELEASED_MERGE),
        made(ColumnSumScorer(), reducer=RELEASED_MERGE),
        made(ColumnSumScorer(), HeadPool(), reducer=LookMMerge("pivot", "misaligned")),
        made(TextPriorScorer(), selector=TextRecents(rule="union")),
        made(allocator=Hybrid(), decoding=ChunkRetrieval()),
        made(allocator=Hybrid(HeadClasses(classes="static")), decoding=ChunkRetrieval(HeadClasses(classes="static"))),
    ],
)
def test_the_sensible_neighbours_are_allowed(compressor):
    refuse(compressor)


def test_a_combination_is_refused_while_a_run_is_planned():
    node = compose(["method=keydiff", "methods.keydiff.excess=8"]).methods["keydiff"]
    with pytest.raises(CompatibilityError, match=r"keydiff: Uniform\(excess=8, unused=0\) may keep more"):
        build_compressor("keydiff", node, "paper", method_defaults(["keydiff"])["keydiff"])


@each(
    ("compressor", "parts"),
    [
        (Compressor("full"), []),
        (made(), []),
        (made(MMShiftScorer()), []),
        (made(MMShiftScorer(modality="separate"), selector=TextFirst()), ["MMShiftScorer", "TextFirst"]),
        (made(TextPriorScorer(), selector=ModalityQuota()), ["TextPriorScorer", "ModalityQuota"]),
        (made(TextPriorScorer(prior=False)), []),
        (made(BlindScorer()), ["BlindScorer"]),
        (method("meda"), ["TextPriorScorer", "Entropy"]),
        (method("h2o"), []),
    ],
)
def test_parts_that_need_two_kinds_of_tokens_are_named(compressor, parts):
    assert visual_parts(compressor) == parts


# ---------------------------------------------------------------- everything else runs

SHAPE = {"length": 40, "kv_heads": 2, "group": 2}


@functools.cache
def registry() -> dict[str, list]:
    """Every distinct part of every registered method under both readings."""
    found: dict[str, dict] = {part: {} for part in ("scorer", "allocator", "selector", "reducer")}
    for name in NAMES:
        for reading in ("paper", "released"):
            for part, seen in found.items():
                one = getattr(method(name, reading), part)
                seen.setdefault(repr(one), one)
    return {part: list(seen.values()) for part, seen in found.items()}


@functools.cache
def prompt():
    needs = functools.reduce(Needs.__or__, (one.needs for kind in ("scorer", "allocator") for one in registry()[kind]))
    seen = []
    for layer in range(LAYERS):
        seen.append(oracles.make_layer(**SHAPE, seed=layer).observe(needs, layer=layer))
        seen[-1].token_types, seen[-1].layers = types_of(SHAPE["length"]), LAYERS
    return seen


@functools.cache
def scores_of(scorer, budget: int):
    return [scorer.score(one, budget, 0) for one in prompt()]


def combinations(count: int) -> list[Compressor]:
    """Pairs of every scorer with every allocator, the selector and reducer of each drawn at random; then any four."""
    parts, stream = registry(), random.Random(5)
    pairs = [(s, a) for s in parts["scorer"] for a in parts["allocator"]]
    pairs += [(stream.choice(parts["scorer"]), stream.choice(parts["allocator"])) for _ in range(count)]
    drawn = [(s, a, stream.choice(parts["selector"]), stream.choice(parts["reducer"])) for s, a in pairs]
    return [Compressor("mixed", *four, "released") for four in drawn]


@pytest.mark.slow
@pytest.mark.parametrize("further", [20, pytest.param(200, marks=pytest.mark.full)])
def test_every_combination_of_registered_parts_runs_or_is_refused(further):
    ran = refused = 0
    for compressor in combinations(further):
        try:
            refuse(compressor)
        except CompatibilityError as error:
            assert re.search(r"allowed: ", str(error))
            refused += 1
            continue
        for budget, strict in ((9, False), (20, True)):
            run(compressor, budget, strict)
        ran += 1
    assert ran > 200 and refused > 20, (ran, refused)


def run(compressor: Compressor, budget: int, strict: bool) -> None:
    """Select and reduce a whole prompt; what is kept is counted against the budget where the parts promise one."""
    scores, length = scores_of(compressor.scorer, budget), SHAPE["length"]
    allocator, seen = compressor.allocator, prompt()
    summaries = {}
    if allocator.summary_key(budget, length) is not None:
        summaries = {layer: allocator.summary(one, budget, 0) for layer, one in enumerate(seen)}
    index = compressor.select(
        scores, budget, types_of(length), range(LAYERS), LAYERS, refed=int(strict), summaries=summaries
    )
    candidates = length - int(strict)
    for one, kept in zip(seen, index, strict=True):
        key, value = one.key[:, :candidates], one.value[:, :candidates]
        for row in kept.tolist():
            real = [j for j in row if j >= 0]
            assert real == sorted(set(real)) and all(j < candidates for j in real)
        small = compressor.reducer.reduce(key, value, kept, types_of(length)[:candidates])
        for entries in small:
            assert entries.shape[:2] == kept.shape and torch.isfinite(entries).all()
        if not compressor.reducer.merges:
            for head, row in enumerate(kept.tolist()):
                want = (
                    torch.stack([key[head, j] if j >= 0 else torch.zeros(key.shape[-1]) for j in row]) if row else None
                )
                assert want is None or torch.equal(small[0][head], want)


def test_paper_readings_of_mixed_parts_keep_their_budget():
    """Parts of the paper readings alone: no combination that is allowed may exceed the budget."""
    paper = [method(name) for name in NAMES]
    stream, ran = random.Random(6), 0
    for _ in range(150):
        parts = [getattr(stream.choice(paper), part) for part in ("scorer", "allocator", "selector", "reducer")]
        compressor = Compressor("mixed", *parts)
        if not [*objections(compressor)]:
            run(compressor, stream.randint(1, 39), stream.random() < 0.5)
            ran += 1
    assert ran > 60


def test_identical_parts_have_identical_objections():
    compressor = made(RecencyScorer(), HeadPool())
    assert [*objections(compressor)] == [*objections(replace(compressor, name="mine"))] != []
