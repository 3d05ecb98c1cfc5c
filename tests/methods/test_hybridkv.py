"""HybridKV's parts against its equations in float64: sparsity, classes, budgets, static selection, chunk retrieval."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.compression.allocators.hybrid import HeadClasses, Hybrid
from mmkv_bench.compression.context import Context
from mmkv_bench.compression.decoding.base import Start
from mmkv_bench.compression.decoding.retrieval import ChunkRetrieval, RetrievalLayer
from mmkv_bench.compression.scorers.window import WindowScorer
from mmkv_bench.compression.selectors.text_first import TextFirst
from mmkv_bench.errors import ConfigError, UnsupportedError
from tests.compression import oracles
from tests.oracles import hybridkv as oracle

few = settings(max_examples=12, deadline=None, derandomize=True)
many = settings(max_examples=120, deadline=None, derandomize=True)
layers = st.builds(
    oracles.make_layer,
    length=st.one_of(st.integers(1, 40), st.integers(41, 160)),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 10**6),
)


def types_of(length: int, seed: int) -> torch.Tensor:
    """Runs of text and visual tokens; some prompts hold one kind only."""
    g = torch.Generator().manual_seed(seed)
    kinds = [(0, 0, 1), (0, 1, 2), (0,), (1,)][seed % 4]
    pieces = [[kinds[i % len(kinds)]] * int(torch.randint(1, 30, (1,), generator=g)) for i in range(length)]
    return torch.tensor(sum(pieces, [])[:length])


# ---------------------------------------------------------------- sparsity


@few
@given(layer=layers, cuts=st.lists(st.integers(1, 159), max_size=3), seed=st.integers(0, 99))
def test_sparsity_is_the_mean_of_the_top_masses_of_text_rows(layer, cuts, seed):
    allocator = Hybrid()
    obs = layer.observe(allocator.needs, cuts)
    obs.token_types = types_of(layer.length, seed)
    got = allocator.summary(obs, 8, 0)
    want = oracle.sparsity(layer.query.float(), layer.key, obs.token_types.tolist(), layer.scaling)
    assert got.dtype == torch.float64 and got.device.type == "cpu"
    assert got.tolist() == pytest.approx(want, rel=2e-6)


def test_the_share_of_top_keys_is_rounded_up_exactly():
    """0.05 of 60 tokens is 3 keys: equal keys give min(3 / (i + 1), 1) in row i; 61 tokens have 4."""
    for length, k in ((60, 3), (61, 4)):
        layer = oracles.make_layer(length, 1, 2)
        layer.key = layer.key[:, :1].expand(-1, length, -1)
        got = Hybrid().summary(layer.observe(Hybrid().needs), 8, 0)
        assert got.tolist() == pytest.approx([sum(min(1, k / (i + 1)) for i in range(length)) / length])


def test_rows_that_see_no_more_than_the_top_keys_are_fully_sparse():
    """A context whose text stands before the image alone tells nothing about its heads: all of them are static."""
    layer, allocator = oracles.make_layer(100, 4, 2), Hybrid()
    obs = layer.observe(allocator.needs)
    obs.token_types = (torch.arange(100) >= 5).long()
    assert allocator.summary(obs, 8, 0).tolist() == [1.0] * 4
    for threshold in ("absolute", "quantile"):
        assert not HeadClasses(1.0, threshold).dynamic({0: allocator.summary(obs, 8, 0)}).any()


def test_sparsity_does_not_depend_on_blocks_of_rows(monkeypatch):
    layer, allocator = oracles.make_layer(90, 2, 3), Hybrid()
    whole = allocator.summary(layer.observe(allocator.needs), 8, 0)
    monkeypatch.setattr("mmkv_bench.compression.statistics.tiles.CPU_TILE", 2000)
    assert torch.allclose(allocator.summary(layer.observe(allocator.needs), 8, 0), whole, rtol=1e-6)


def test_sparsity_needs_no_square_memory(monkeypatch):
    monkeypatch.setattr("mmkv_bench.compression.statistics.tiles.CPU_TILE", 2**16)
    layer, allocator = oracles.make_layer(600, 1, 4), Hybrid()
    obs = layer.observe(allocator.needs)
    assert oracles.allocator_peak(lambda: allocator.summary(obs, 8, 0)) < 4 * 4 * 2**16 < 600 * 600 * 4 * 4 / 4


def test_equal_query_heads_have_the_sparsity_of_one():
    layer = oracles.make_layer(50, 2, 1)
    wide = replace(
        layer,
        wq=layer.wq.view(2, 8, -1).repeat_interleave(3, 0).flatten(0, 1),
        bq=layer.bq.view(2, 8).repeat(1, 3).view(-1),
    )
    one, three = (Hybrid().summary(x.observe(Hybrid().needs), 8, 0) for x in (layer, wide))
    assert torch.allclose(one, three, rtol=1e-6)


# ---------------------------------------------------------------- classes and budgets


@st.composite
def sparsities(draw):
    n_layers, heads = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 8]))
    if draw(st.booleans()):
        value = st.sampled_from([0.5, 0.75, 0.9, 1.0])
    else:
        value = st.floats(0.05, 1)
    rows = st.lists(st.lists(value, min_size=heads, max_size=heads), min_size=n_layers, max_size=n_layers)
    return draw(rows)


def summaries(rows):
    return {i: torch.tensor(row, dtype=torch.float64) for i, row in enumerate(rows)}


@many
@given(
    rows=sparsities(),
    theta=st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]),
    threshold=st.sampled_from(["absolute", "quantile"]),
    classes=st.sampled_from(["hybrid", "static", "dynamic"]),
)
def test_classes_equal_the_definition(rows, theta, threshold, classes):
    got = HeadClasses(theta, threshold, classes).dynamic(summaries(rows))
    assert got.tolist() == oracle.dynamic(rows, theta, threshold, classes)


@many
@given(
    rows=sparsities(),
    n=st.integers(1, 300),
    share=st.floats(0, 1),
    theta=st.sampled_from([0.0, 0.6, 0.9, 1.0]),
    r=st.sampled_from(["0.1", "0.25", "0.75", "1.0", "1.25", "3"]),
    alpha=st.sampled_from(["0", "0.5", "0.29", "1"]),
    power=st.sampled_from(["down", "down", "none", "up"]),
    chunk=st.sampled_from([1, 6, 8]),
)
def test_budgets_equal_the_equations_and_stay_within_the_total(rows, n, share, theta, r, alpha, power, chunk):
    budget = int(share * (n - 1))  # 0 .. n - 1
    allocator = Hybrid(HeadClasses(theta), float(r), float(alpha), chunk=chunk, power=power)
    found = allocator.divide(summaries(rows), budget, n)
    moving = oracle.dynamic(rows, theta)
    want = oracle.budgets(rows, moving, budget, n, Fraction(r), Fraction(alpha), chunk, power)
    assert found.dynamic.tolist() == moving and found.entries.tolist() == want
    assert found.entries.dtype == torch.int64 and int(found.entries.min()) >= 0 and int(found.entries.max()) <= n
    total, heads = budget * found.entries.numel(), found.entries.numel()
    n_dynamic = int(found.dynamic.sum())
    assert found.clipped == (0 < n_dynamic < heads and -(-Fraction(r) * budget * n_dynamic // 1) > total)
    if power == "up":
        return
    assert int(found.entries.sum()) <= total
    static = found.entries[~found.dynamic]
    if len(static) and bool((static < n).any()):
        assert int(found.entries.sum()) == total  # a static head can take what rounding leaves
    for entries in found.entries[found.dynamic].tolist():
        assert entries == n or entries < chunk or entries % chunk == 0
        assert power == "none" or chunk != 8 or entries in (0, n) or entries & (entries - 1) == 0
    scores = [torch.zeros(len(rows[0]), n)] * len(rows)
    caps = allocator.caps(scores, budget, range(len(rows)), len(rows), Context(budget, n, summaries=summaries(rows)))
    assert [c.tolist() for c in caps] == want


def test_budgets_by_hand():
    """Two layers of two heads, C = 100 of 1000: B = 400; one dynamic head: ceil(75) -> 64; 336 for three static."""
    rows = [[0.95, 0.5], [1.0, 0.9]]
    found = Hybrid().divide(summaries(rows), 100, 1000)
    assert found.dynamic.tolist() == [[False, True], [False, False]]  # 0.9 is static: S* >= theta
    # base 56 each; 168 * (0.95, 1.0, 0.9) / 2.85 = 56, 58.947, 53.053
    assert found.entries.tolist() == [[112, 64], [115, 109]]
    # without head-level allocation, and without both levels
    assert Hybrid(alpha=1.0).divide(summaries(rows), 100, 1000).entries.tolist() == [[112, 64], [112, 112]]
    assert Hybrid(alpha=1.0, r=1.0).divide(summaries(rows), 100, 1000).entries.tolist() == [[112, 64], [112, 112]]
    plain = Hybrid(alpha=1.0, r=1.0, power="none").divide(summaries(rows), 100, 1000)
    assert plain.entries.tolist() == [[102, 96], [101, 101]]  # whole chunks of 8
    up = Hybrid(power="up").divide(summaries(rows), 100, 1000)
    assert int(up.entries[0, 1]) == 128 and int(up.entries.sum()) == 400 - 75 + 128


def test_models_of_one_kind_of_head_get_the_whole_budget():
    rows = [[0.5, 0.6], [0.7, 0.8]]
    assert Hybrid().divide(summaries(rows), 100, 1000).entries.tolist() == [[64, 64]] * 2
    static = Hybrid(HeadClasses(classes="static")).divide(summaries(rows), 100, 1000)
    assert int(static.entries.sum()) == 400 and not static.dynamic.any()


def test_a_share_coefficient_above_the_budget_is_cut_and_said_to_be():
    rows = [[0.5] * 9 + [1.0]]
    assert not Hybrid(r=1.0).divide(summaries(rows), 80, 1000).clipped
    found = Hybrid(r=1.25).divide(summaries(rows), 80, 1000)
    assert found.clipped and found.entries.tolist() == [[64] * 9 + [800 - 9 * 64]]


def test_calibrated_thresholds_replace_theta():
    rows = summaries([[0.5, 0.7]])
    assert HeadClasses(0.9, calibration={"theta": 0.6}).dynamic(rows).tolist() == [[True, False]]
    with pytest.raises(ConfigError, match="no theta"):
        HeadClasses(calibration={"heads": []})
    with pytest.raises(ConfigError, match="threshold=absolute"):
        HeadClasses(threshold="quantile", calibration={"theta": 0.6})


# ---------------------------------------------------------------- static heads


@few
@given(layer=layers, share=st.floats(0, 1), strict=st.booleans(), seed=st.integers(0, 99), data=st.data())
def test_static_heads_keep_window_text_and_the_best_visual_tokens(layer, share, strict, seed, data):
    total = layer.length
    types, budget = types_of(total, seed), 1 + int(share * total)
    n, w = total - int(strict), min(32, max(1, budget // 2), total)
    heads = layer.key.shape[0]
    caps = torch.tensor([data.draw(st.integers(0, n)) for _ in range(heads)])
    scorer, selector = WindowScorer(window=32, pool=1), TextFirst(window=32)
    scores = scorer.score(layer.observe(scorer.needs), budget, 0)
    protected = selector.protected(total, budget, types)[:n]
    got = selector.select(scores[:, :n], caps, protected)
    sums = oracle.window_sums(layer.query.float(), layer.key, layer.scaling, w)
    for head, row in enumerate(got.tolist()):
        assert [j for j in row if j >= 0] == oracle.kept(sums[head], int(caps[head]), w, types.tolist(), n)


def test_text_that_does_not_fit_loses_its_oldest_tokens():
    types = torch.tensor([0, 0, 0, 1, 1, 0, 1, 1])
    selector, scores = TextFirst(window=2), torch.tensor([[9.0, 9, 9, 1, 5, 9, 2, 3]])
    for cap, kept in ((1, [7]), (2, [6, 7]), (4, [2, 5, 6, 7]), (6, [0, 1, 2, 5, 6, 7]), (7, [0, 1, 2, 4, 5, 6, 7])):
        index = selector.select(scores, torch.tensor([cap]), selector.protected(8, 4, types))
        assert index.tolist() == [kept]
    alone = selector.select(scores, torch.tensor([3]), selector.protected(8, 4, None))
    assert alone.tolist() == [[5, 6, 7]]  # without types all is text


def test_prompts_of_one_kind_of_token_are_recorded():
    text, visual, both = torch.zeros(4), torch.ones(4), torch.tensor([0, 2, 0, 0])
    assert TextFirst().fallbacks(4, 9, None) == TextFirst().fallbacks(4, 9, text) == ("no_visual_tokens",)
    assert TextFirst().fallbacks(4, 9, both) == TextFirst().fallbacks(4, 9, visual) == ()
    assert Hybrid().fallbacks(4, 9, visual) == ("no_text_tokens",)
    assert Hybrid().fallbacks(4, 9, None) == Hybrid().fallbacks(4, 9, text) == Hybrid().fallbacks(4, 9, both) == ()


# ---------------------------------------------------------------- retrieval


def begin(n, heads, dynamic, entries, seed=0, pad=0, partial="ranked", chunk=8, dim=8, dtype=torch.float32, reserve=16):
    """A layer whose dynamic heads may read `entries` each and whose static heads keep the last `entries`."""
    g = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(heads, n, dim, generator=g).to(dtype) for _ in range(2))
    index = torch.arange(n - entries, n).expand(heads, -1)
    wide = index.unsqueeze(-1).expand(-1, -1, dim)
    rows = {0: torch.tensor([0.0 if h in dynamic else 1.0 for h in range(heads)], dtype=torch.float64)}
    start = Start(
        layer=0,
        n_layers=1,
        key=key,
        value=value,
        index=index,
        kept_key=key.gather(1, wide),
        kept_value=value.gather(1, wide),
        scores=None,
        context=Context(entries, n, summaries=rows),
        pad=pad,
        seen=pad + n,
        acts_from=pad + n,
        scaling=0.3,
        reserve=reserve,
    )
    return key, value, ChunkRetrieval(HeadClasses(0.5), chunk, partial).layer(start)


def step(layer: RetrievalLayer, query, new_key, new_value):
    """What a forward pass of m tokens does: append, attend causally, float64 softmax over what the layer shows."""
    heads, rows = new_key.shape[0], new_key.shape[1]
    key, value = layer.update(new_key[None], new_value[None])
    mask = torch.ones(rows, layer.seen, dtype=torch.bool).tril_(layer.seen - rows)[None, None]
    key, value, shown = layer.attend(query[None], key, value, mask)
    key, value = (x[0].double().repeat_interleave(query.shape[0] // heads, 0) for x in (key, value))
    scores = (query.double() @ key.transpose(1, 2) * 0.3).masked_fill(~shown[0], float("-inf"))
    return scores.softmax(-1) @ value


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    n=st.integers(1, 90),
    share=st.floats(0, 1),
    group=st.sampled_from([1, 3]),
    dynamic=st.sampled_from([{0}, {1}, {0, 2}, {0, 1, 2}, set()]),
    partial=st.sampled_from(["ranked", "visible"]),
    pad=st.sampled_from([0, 3]),
    seed=st.integers(0, 10**6),
)
def test_each_step_attends_to_the_chunks_that_its_query_chooses(n, share, group, dynamic, partial, pad, seed):
    entries = int(share * n)
    entries = entries if entries < 8 or entries == n else entries - entries % 8
    key, value, layer = begin(n, 3, dynamic, entries, seed, pad, partial)
    g = torch.Generator().manual_seed(seed + 1)
    appended_key, appended_value = torch.zeros(3, 0, 8), torch.zeros(3, 0, 8)
    for rows in (1, 4, 1, 1):  # a block of several tokens in between
        query = torch.randn(3 * group, rows, 8, generator=g)
        new_key, new_value = (torch.randn(3, rows, 8, generator=g) for _ in range(2))
        got = step(layer, query, new_key, new_value)
        appended_key, appended_value = torch.cat([appended_key, new_key], 1), torch.cat([appended_value, new_value], 1)
        before = appended_key.shape[1] - rows
        positions = layer.slot_positions()[0]
        for h in range(3):
            own = query[h * group : (h + 1) * group]
            read = oracle.chunks(own, key[h], entries, 8, partial) if h in dynamic else list(range(n - entries, n))
            assert len(read) <= entries
            # the device holds these and the appended tokens, at their logical positions, and nothing else
            stored = [p for p in positions[h].tolist() if p >= 0]
            assert stored == [j + pad for j in read] + [n + pad + j for j in range(before + rows)]
            for member in range(group):
                for i in range(rows):
                    k = torch.cat([key[h, read], appended_key[h, : before + i + 1]]).double()
                    v = torch.cat([value[h, read], appended_value[h, : before + i + 1]]).double()
                    want = torch.softmax(own[member, i].double() @ k.T * 0.3, 0) @ v
                    assert (got[h * group + member, i] - want).abs().max() <= 2e-6


@pytest.mark.parametrize("n", [1, 7, 8, 9, 64, 65])
@pytest.mark.parametrize("partial", ["ranked", "visible"])
def test_all_chunks_are_the_full_cache(n, partial):
    key, value, layer = begin(n, 2, {0, 1}, n, partial=partial)
    g = torch.Generator().manual_seed(9)
    for _ in range(3):
        query, new = torch.randn(4, 1, 8, generator=g), torch.randn(2, 1, 8, generator=g)
        key, value = torch.cat([key, new], 1), torch.cat([value, new], 1)
        got = step(layer, query, new, new)
        k, v = (x.double().repeat_interleave(2, 0) for x in (key, value))
        want = (query.double() @ k.transpose(1, 2) * 0.3).softmax(-1) @ v
        assert (got - want).abs().max() <= 2e-6
        assert torch.equal(layer.keys[0], key) and torch.equal(layer.values[0], value)


def test_equal_chunks_are_taken_from_the_first():
    _, _, layer = begin(64, 1, {0}, 16)
    layer.pages.means.fill_(1.0)
    assert layer.pages.best(torch.ones(1, 8), False).tolist() == [[0, 1]]


def test_an_incomplete_chunk_counts_by_the_mean_of_what_exists():
    key = torch.zeros(1, 10, 4)
    key[0, 8:, 0], key[0, :8, 0] = 3.0, 2.0  # padded with zeros the last chunk's mean would be 0.75
    index = torch.arange(2, 10)[None]
    context = Context(8, 10, summaries={0: torch.zeros(1, dtype=torch.float64)})
    start = Start(0, 1, key, key, index, key[:, 2:], key[:, 2:], None, context, 0, 10, 10, 1.0, 4)
    layer = ChunkRetrieval().layer(start)
    assert layer.pages.means[0, :, 0].tolist() == [2.0, 3.0]
    query = torch.tensor([[1.0, 0, 0, 0]])
    assert layer.pages.best(query, False).tolist() == [[1]]
    assert layer.pages.best(-query, False).tolist() == [[0]]
    assert layer.pages.best(-query, True).tolist() == [[1]]  # partial=visible
    pages = layer.pages.keys.view(1, 2, 8, 4)
    assert torch.equal(pages[0, 1, :, 0], torch.full((8,), 3.0))


def test_bytes_and_entries_are_those_of_the_tensors():
    _, _, layer = begin(100, 3, {0, 2}, 16, dim=8)
    assert layer.entries().tolist() == [[16, 16, 16]] and layer.reachable().tolist() == [[100, 16, 100]]
    slot = 2 * 8 * 4
    # 13 chunks of 8 for two heads, and a buffer of two chunks per head; 13 mean keys per head and int32 positions
    assert layer.host_nbytes() == 2 * 13 * 8 * slot + 2 * 16 * slot
    assert layer.nbytes() == (3 * 16 * slot, 3 * 16 * 4 + 2 * 13 * 8 * 4)
    step(layer, torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.randn(3, 1, 8))
    assert layer.reachable().tolist() == [[101, 17, 101]] and int(layer.entries().max()) <= 17
    assert layer.nbytes() == (3 * 17 * slot, 3 * 17 * 4 + 2 * 13 * 8 * 4)
    _, _, still = begin(100, 3, set(), 16)
    assert still.host_nbytes() == 0 and torch.equal(still.reachable(), still.entries())


def test_nothing_of_the_full_cache_stays_on_the_device():
    """Tensors that the layer holds, found by walking its attributes, are those that it counts (slack aside)."""
    key, value, layer = begin(200, 2, {0}, 16, reserve=0)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(layer)}
    assert key.data_ptr() not in held and value.data_ptr() not in held
    assert sum(held.values()) == sum(layer.nbytes()) + layer.host_nbytes() + layer.heads.nbytes


def tensors(thing):
    for value in list(vars(thing).values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list):
            yield from (v for v in value if isinstance(v, torch.Tensor))
        elif hasattr(value, "__dict__") and type(value).__module__.startswith("mmkv_bench"):
            yield from tensors(value)


def test_half_precision_chooses_the_chunks_of_its_rounded_keys():
    key, _, layer = begin(61, 2, {0, 1}, 16, dtype=torch.bfloat16)
    query = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    step(layer, query, *(torch.zeros(2, 1, 8, dtype=torch.bfloat16) for _ in range(2)))
    rounded = [torch.stack([page.float().mean(0).bfloat16() for page in key[h].split(8)]) for h in range(2)]
    for h in range(2):
        scores = (rounded[h].double() @ query[h, 0].double()).tolist()
        best = sorted(sorted(range(8), key=lambda c: (-scores[c], c))[:2])
        want = [j for c in best for j in range(8 * c, min(8 * c + 8, 61))]
        assert [p for p in layer.slot_positions()[0, h].tolist() if 0 <= p < 61] == want


def test_one_sequence_only():
    _, _, layer = begin(30, 2, {0}, 8)
    with pytest.raises(UnsupportedError, match="one sequence"):
        layer.batch_repeat_interleave(2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HeadClasses(theta=1.5), "theta is 1.5"),
        (lambda: HeadClasses(threshold="relative"), "threshold is 'relative'"),
        (lambda: HeadClasses(classes="dynamics"), "did you mean 'dynamic'"),
        (lambda: Hybrid(r=0), "r is 0"),
        (lambda: Hybrid(alpha=1.1), "alpha is 1.1"),
        (lambda: Hybrid(top=0), "top is 0"),
        (lambda: Hybrid(chunk=0), "chunk is 0"),
        (lambda: Hybrid(power="half"), "power is 'half'"),
        (lambda: ChunkRetrieval(chunk=0), "chunk is 0"),
        (lambda: ChunkRetrieval(partial="hidden"), "partial is 'hidden'"),
    ],
)
def test_impossible_parameters_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
