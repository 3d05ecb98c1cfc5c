"""HybridKV through models of three families: what it keeps is the oracle's, and decoding with retrieval is stock
attention over a full cache whose mask shows, at each step and layer, what the oracle reads there."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
import torch

from mmkv_bench.compression.allocators.hybrid import Hybrid
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.decoding.retrieval_layer import RetrievalLayer
from mmkv_bench.compression.session import attach
from mmkv_bench.config.compose import compose
from mmkv_bench.errors import ConfigError
from mmkv_bench.generation.unshared_generation import generate_alone
from mmkv_bench.methods.build import build_compressor
from tests import cover, reference, zoo
from tests.each import each
from tests.generation import common
from tests.oracles import hybridkv as oracle

FAMILIES = ("qwen2_5_vl", "llava_next", "internvl_qwen3")  # mrope and GQA; MHA; query norm
TOLERANCE = 2e-6


def method(reading: str = "paper", **over) -> Compressor:
    """HybridKV as a run builds it; half of the heads are dynamic unless told otherwise."""
    over = {"threshold": "quantile", "theta": 0.5} | over
    config = compose(["method=hybridkv", *(f"methods.hybridkv.{key}={value}" for key, value in over.items())])
    return build_compressor("hybridkv", config.methods["hybridkv"], reading)


# ---------------------------------------------------------------- the oracle of a whole model


def rotated(module, hidden, embeddings, kind: str) -> torch.Tensor:
    """Post-RoPE queries or keys [heads,n,D] of one sequence, from the module's weights."""
    x = getattr(module, f"{kind}_proj")(hidden).view(hidden.shape[1], -1, module.head_dim)
    norm = getattr(module, f"{kind}_norm", None)
    x = (x if norm is None else norm(x)).transpose(0, 1)
    cos, sin = (part[0] for part in embeddings)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


@contextlib.contextmanager
def watched(model):
    """Yields layer -> post-RoPE (queries, keys) of the latest forward pass."""
    latest = {}

    def note(module, args, kwargs):
        hidden, rope = kwargs["hidden_states"], kwargs["position_embeddings"]
        latest[module.layer_idx] = tuple(rotated(module, hidden, rope, kind) for kind in "qk")

    layers = model.get_decoder().layers
    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield latest
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Plan:
    """What the oracle does with a prompt: the first `n` of its tokens are candidates."""

    n: int
    keys: list[torch.Tensor]
    dynamic: list[list[bool]]
    entries: list[list[int]]
    kept: list[list[list[int]]]  # of static heads; [] for dynamic ones
    chunk: int = 8
    partial: str = "ranked"

    def rule(self, latest, groups: int):
        """(layer, rows, columns) -> visible [1,Hkv,rows,columns]: all rows from n on that are fed together are a step."""

        def visible(layer, rows, columns):
            shown = torch.ones(1, len(self.kept[layer]), len(rows), columns, dtype=torch.bool)
            late = rows >= self.n
            if not late.any():
                return shown
            queries = latest[layer][0][:, late]
            for h, read in enumerate(self.kept[layer]):
                if self.dynamic[layer][h]:
                    own = queries[h * groups : (h + 1) * groups]
                    read = oracle.chunks(own, self.keys[layer][h], self.entries[layer][h], self.chunk, self.partial)
                columns_shown = torch.zeros(self.n, dtype=torch.bool)
                columns_shown[read] = True
                shown[0, h, late, : self.n] = columns_shown
            return shown

        return visible


@torch.no_grad()
def planned(model, inputs, types, entries: int, strict: bool, context: int | None = None, **over) -> Plan:
    """The oracle's plan of a prompt (or of its first `context` tokens), from a stock prefill."""
    parameters = {"theta": 0.5, "threshold": "quantile", "classes": "hybrid", "r": "0.75", "alpha": "0.5"} | over
    with watched(model) as latest:
        model(**inputs, use_cache=True)
        seen = {layer: tuple(x[:, :context] for x in pair) for layer, pair in latest.items()}
    types = types[:context]
    total, scaling = len(types), zoo.HEAD_DIM**-0.5
    n, granted = total - int(strict), entries - int(strict)
    seen = [seen[layer] for layer in sorted(seen)]
    scores = [oracle.sparsity(q, k, types, scaling) for q, k in seen]
    moving = oracle.dynamic(scores, parameters["theta"], parameters["threshold"], parameters["classes"])
    counts = oracle.budgets(scores, moving, granted, n, Fraction(parameters["r"]), Fraction(parameters["alpha"]))
    w, kept = min(32, max(1, entries // 2), total), []
    for (q, k), is_moving, cap in zip(seen, moving, counts, strict=True):
        sums = oracle.window_sums(q, k, scaling, w)
        kept.append([[] if m else oracle.kept(s, c, w, types, n) for m, s, c in zip(is_moving, sums, cap, strict=True)])
    return Plan(n, [k[:, :n] for _, k in seen], moving, counts, kept, partial=parameters.get("partial", "ranked"))


def types_of(model, ids) -> list[int]:
    config = model.config
    video = getattr(config, "video_token_id", None)
    return [1 if i == getattr(config, "image_token_id", None) else 2 if i == video else 0 for i in ids.tolist()]


def groups_of(model) -> int:
    config = model.config.get_text_config(decoder=True)
    return config.num_attention_heads // config.num_key_value_heads


def assert_plan(session, plan: Plan) -> None:
    """Static heads keep the oracle's entries; dynamic heads have the oracle's number of them."""
    for layer, index in enumerate(session.kept()):
        for h, row in enumerate(index[0].tolist()):
            real = [j for j in row if j >= 0]
            if plan.dynamic[layer][h]:
                assert len(real) == plan.entries[layer][h]
            else:
                assert real == plan.kept[layer][h]


# ---------------------------------------------------------------- equal to masked full attention


def check(model, inputs, entries, protocol="paper", context=None, tokens=6, reading="paper", **over):
    """Both paths' logits of every new token; returns how far the method moves them from the full cache's."""
    types = types_of(model, inputs["input_ids"][0])
    plan = planned(model, inputs, types, entries, protocol == "strict", context, **over)
    made = method(reading, **over)
    got = generate_alone(
        model,
        inputs,
        made,
        Budget.parse(entries),
        protocol,
        context=context,
        token_types=torch.tensor([types]),
        max_new_tokens=tokens,
    )
    assert_plan(got.session, plan)
    with watched(model) as latest, reference.masked(model, plan.rule(latest, groups_of(model))) as cache:
        want = reference.generate(model, inputs, tokens, past_key_values=cache)
    assert torch.equal(got.sequences[:, inputs["input_ids"].shape[1] :], want.tokens)
    assert (torch.stack(got.logits) - want.logits).abs().max() <= TOLERANCE
    untouched = reference.generate(model, inputs, tokens)
    return float((want.logits[1] - untouched.logits[1]).abs().max()), got, plan


@pytest.mark.slow
@cover.few("family", FAMILIES, first=1)
@each("protocol", common.PROTOCOLS)
def test_decoding_is_masked_full_attention_with_the_oracles_chunks(family, protocol):
    model, inputs = zoo.model(family), zoo.prompt(family, before=30)
    prompt = common.encoded(family, inputs)
    context = common.context_cut(prompt, common.family(family)) if protocol == "query_agnostic" else None
    moved, got, plan = check(model, inputs, 14, protocol, context)
    assert moved > 1e-3
    kinds = {h for row in plan.dynamic for h in row}
    assert kinds == {True, False}
    read = [
        c for row, moving in zip(plan.entries, plan.dynamic, strict=True) for c, m in zip(row, moving, strict=True) if m
    ]
    assert set(read) == {8}  # one chunk of those that there are: the step decides


@pytest.mark.full
@cover.few("family", FAMILIES[:2], first=1)
@each(
    "over",
    [
        {"classes": "dynamic"},
        {"classes": "static"},
        {"classes": "dynamic", "partial": "visible"},
        {"r": "1.25", "alpha": "1.0"},
    ],
)
def test_heads_of_one_kind_and_other_shares(family, over):
    model, inputs = zoo.model(family), zoo.prompt(family)
    moved, got, plan = check(model, inputs, 24, **over)
    assert moved > 1e-3
    if over.get("classes") == "static":
        assert sum(map(sum, plan.entries)) == 24 * sum(map(len, plan.entries))
        assert all(layer.host_nbytes() == 0 for layer in got.session.cache.layers)
    if over.get("classes") == "dynamic":
        assert {c for row in plan.entries for c in row} == {16}


@pytest.mark.full
@each("budget", [1, 2, 5])
@each("protocol", ["paper", "strict"])
def test_budgets_below_the_text_and_below_a_chunk(budget, protocol):
    model, inputs = zoo.model("qwen2_5_vl"), zoo.prompt("qwen2_5_vl")
    check(model, inputs, budget, protocol, tokens=4)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl"])
@each("length", [23, 40])
def test_prompts_without_visual_tokens(family, length):
    model, inputs = zoo.model(family), zoo.without_visual(family, length)
    moved, got, plan = check(model, inputs, 14)
    assert moved > 1e-3
    for row, moving in zip(plan.kept, plan.dynamic, strict=True):  # static heads keep the most recent tokens
        assert all(m or kept == list(range(length - len(kept), length)) for kept, m in zip(row, moving, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_second_turn_is_one_step_per_forward_pass(family):
    """Tokens of a later turn are fed as a block and choose together; single tokens before and after choose alone."""
    model, inputs = zoo.model(family), zoo.prompt(family)
    types = types_of(model, inputs["input_ids"][0])
    plan = planned(model, inputs, types, 14, False)
    blocks = [torch.tensor([zoo.text(count, seed)]) for seed, count in enumerate((1, 7, 1))]

    def run(cache=None):
        output = model(**inputs, use_cache=True, past_key_values=cache)
        found = []
        for block in blocks:
            output = model(input_ids=block, past_key_values=output.past_key_values)
            found.append(output.logits)
        return torch.cat(found, 1)

    with attach(model, method(), Budget.parse(14)) as session:
        got = run()
        assert_plan(session, plan)
    with watched(model) as latest, reference.masked(model, plan.rule(latest, groups_of(model))) as cache:
        want = run(cache)
    assert (got - want).abs().max() <= TOLERANCE
    assert (got - run()).abs().max() > 1e-3


class Everything(Hybrid):
    """Every head may read all there is."""

    def caps(self, scores, budget, layers, n_layers, context=None):
        return [torch.full((score.shape[0],), score.shape[1]) for score in scores]


@cover.few("family", FAMILIES, first=2)
@each("protocol", common.PROTOCOLS)
def test_retrieval_of_all_chunks_is_the_full_cache(family, protocol):
    model, inputs, prompt = zoo.model(family), zoo.prompt(family), common.encoded(family)
    made = method("released", classes="dynamic")
    made = replace(made, allocator=Everything(made.allocator.heads))
    cells = [common.cell(made, 5, protocol, name="all"), common.full_cells([protocol])[0]]
    every, untouched = common.together(model, family, prompt, cells)
    assert every.status == untouched.status == "ok", every.error
    assert every.token_ids == untouched.token_ids and every.bytes_host > every.bytes_full
    context = common.context_cut(prompt, common.family(family)) if protocol == "query_agnostic" else None
    got = generate_alone(
        model, inputs, made, Budget.parse(5), protocol, context=context, token_types=prompt.types, max_new_tokens=5
    )
    assert all(isinstance(layer, RetrievalLayer) for layer in got.session.cache.layers)
    assert (torch.stack(got.logits) - reference.generate(model, inputs, 5).logits).abs().max() <= TOLERANCE


# ---------------------------------------------------------------- forks, rows and what they count


@pytest.mark.full
@cover.few("family", FAMILIES)
def test_forks_answer_as_alone(family):
    model, prompt = zoo.model(family), common.encoded(family, before=30)
    variants = {"": {}, "-dynamic": {"classes": "dynamic"}, "-static": {"classes": "static"}}
    cells = [
        common.cell(method(**over), budget, protocol, name=f"{budget}/{protocol}{name}")
        for name, over in variants.items()
        for budget in (3, 14, 0.5)
        for protocol in common.PROTOCOLS
    ]
    for result in common.assert_forks_equal_alone(model, family, prompt, cells):
        assert result.entries_resident <= result.entries_asked
        if result.cell.endswith("-static"):
            assert result.entries_reachable == result.entries_resident and result.bytes_host == 0
        elif result.cell.endswith("-dynamic"):
            assert result.entries_reachable == result.bytes_full // (2 * zoo.HEAD_DIM * 4)
            assert (
                result.bytes_host >= result.bytes_full - len(result.kept) * len(result.kept[0]) * 2 * zoo.HEAD_DIM * 4
            )
        else:
            assert result.entries_resident < result.entries_reachable and result.bytes_host > 0


@pytest.mark.slow
def test_text_prompts_answer_as_alone_and_say_what_they_lack():
    model, prompt = zoo.model("llama"), common.encoded("llama")
    cells = [common.cell(method(), budget, protocol) for budget in (5, 20) for protocol in common.PROTOCOLS[:2]]
    for result in common.assert_forks_equal_alone(model, "llama", prompt, cells):
        assert {"no_visual_tokens", "text_over_budget"} <= set(result.fallback)


def test_rows_say_what_could_not_be_done():
    model, prompt = zoo.model("llava_next"), common.encoded("llava_next")
    cells = {
        "plain": common.cell(method(window=4), 60, name="plain"),
        "text": common.cell(method(window=4, classes="static"), 12, name="text"),
        "chunk": common.cell(method(window=2), 6, name="chunk"),
        "clipped": common.cell(method(window=4, theta=0.9, r=1.25), 60, name="clipped"),
        "whole": common.cell(method(), 200, name="whole"),
    }
    found = {r.cell: set(r.fallback) for r in common.together(model, "llava_next", prompt, list(cells.values()))}
    assert found["plain"] == set()
    assert found["text"] == {"text_over_budget"}  # 14 tokens of text, 12 entries per head
    assert found["chunk"] >= {"text_over_budget", "chunk_reduced"}
    assert found["clipped"] >= {"infeasible_allocation"}
    assert found["whole"] == {"prompt_within_budget"}


def test_a_budget_padded_to_the_next_power_may_exceed_the_budget_and_says_so():
    made = method(power="up", classes="dynamic")
    assert made.reading == "paper" and made.exceeds_as_printed and made.version == 2
    model, prompt = zoo.model("llava_next"), common.encoded("llava_next")
    (excess,) = common.together(model, "llava_next", prompt, [common.cell(made, 40)])
    assert excess.status == "ok" and excess.entries_resident > excess.entries_asked


def test_the_prefills_own_cache_is_given_up():
    """After attach() reduced a prompt no tensor of its full length is left on the device."""
    model, inputs = zoo.model("llava_next"), zoo.prompt("llava_next")
    length = inputs["input_ids"].shape[1]
    with attach(model, method(), Budget.parse(14), reserve=1) as session:
        model(**inputs, use_cache=True)
        for layer in session.cache.layers:
            assert isinstance(layer, RetrievalLayer) and layer.capacity < length // 2
            assert layer.pages is None or layer.pages.means.shape[1] == -(-length // 8)


def test_a_calibration_that_was_not_loaded_is_no_threshold():
    config = compose(["method=hybridkv", "methods.hybridkv.calibration=auto"])
    made = build_compressor("hybridkv", config.methods["hybridkv"], "paper")
    model, prompt = zoo.model("llava_next"), common.encoded("llava_next")
    (result,) = common.together(model, "llava_next", prompt, [common.cell(made, 14)])
    assert result.status == "error" and ConfigError.__name__ in result.error and "gives no theta" in result.error
