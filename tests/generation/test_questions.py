"""Many questions per cache: what protocols that compress a document once keep, whatever was asked before."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.generation.encode import DocumentPrompts, EncodedPrompt, same_context
from mmkv_bench.generation.engine import Engine
from mmkv_bench.generation.meter import Meter
from mmkv_bench.generation.prefill import prefill
from mmkv_bench.protocols import protocol
from tests import cover, zoo
from tests.core import parts
from tests.generation import common

NEW = ("query_first", "query_joint", "query_generic", "query_paraphrase")
ONCE = ("query_agnostic", "query_first", "query_joint", "query_generic")
QUESTIONS = 4
NAMES = ("llama", "qwen2_5_vl")
PATH = common.PATH | {"compression_reused"}


def document(name: str, first: int = 1, tails: tuple[int, ...] = (9, 12, 7, 10)) -> list[EncodedPrompt]:
    """Prompts of one document's questions of different lengths, each with the document."""
    start = common.encoded(name, zoo.prompt(name, after=3))
    is_text = name in ("llama", *zoo.HYBRID)
    cut = start.length - 2 if is_text else common.context_cut(start, common.family(name))

    def asked(length: int, seed: int, identity: str) -> EncodedPrompt:
        ids = torch.cat([start.input_ids[:, :cut], torch.tensor([zoo.text(length, seed)])], 1)
        made = common.encoded(name, zoo.with_ids(name, start.inputs, ids), identity)
        return dataclasses.replace(made, context_tokens=cut if is_text else None)

    questions = tuple(asked(length, 50 + place, f"zoo/{place}") for place, length in enumerate(tails))
    reworded = tuple(asked(8, 80 + place, f"zoo/{place}/other") for place in range(len(tails)))
    shared = DocumentPrompts("zoo/document", 0, questions, first, asked(6, 99, "zoo/generic"), reworded)
    return [
        dataclasses.replace(one, document=dataclasses.replace(shared, number=place))
        for place, one in enumerate(questions)
    ]


def grid(protocols, budget=12) -> list:
    methods = {
        "window": parts.window(),
        "ragged": parts.window(kind="all_ragged"),
        "random": parts.compressor(),
        **{name: common.registry(model="llama")[name] for name in ("snapkv", "keydiff", "h2o_decode", "pyramidkv")},
    }
    cells = [common.cell(made, budget, one, name=f"{n}/{one}") for one in protocols for n, made in methods.items()]
    return cells + [common.cell(common.registry()["full"], None, one, name=f"full/{one}") for one in protocols]


def asked(name: str, prompts, cells, order=range(QUESTIONS)) -> dict[tuple[int, str], object]:
    """(question, cell) -> result, of one engine that answers the questions in this order."""
    model = zoo.model(name)
    answers = {}
    with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
        for number in order:
            for one in engine.answer(prompts[number], cells):
                assert one.status == "ok", one.error
                answers[number, one.cell] = one
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_compressed_once_for_its_first_question_and_that_question_is_answered_as_by_query_aware(name):
    first, prompts = 1, document(name)
    together = asked(name, prompts, grid(("query_aware", *ONCE)))
    for cell in grid(ONCE):
        method, rule = cell.cell.split("/")
        kept = [together[number, cell.cell].kept_digest for number in range(QUESTIONS)]
        assert len(set(kept)) == 1, cell.cell
        reused = [together[number, cell.cell].compression_reused for number in range(QUESTIONS)]
        assert reused == [False, True, True, True]
        if rule == "query_first":
            aware = together[first, f"{method}/query_aware"]
            assert kept[0] == aware.kept_digest
            known = {"question_known", "compression_reused"}
            common.assert_same(
                [dataclasses.replace(together[first, cell.cell], cell="")],
                [dataclasses.replace(aware, cell="")],
                ignore=common.PATH | known,
            )
    assert {one.question_known for (_, cell), one in together.items() if cell.endswith("joint")} == {"0,1,2,3"}
    assert {one.question_known for (_, cell), one in together.items() if cell.endswith("aware")} == {None}


@pytest.mark.slow
@cover.few("name", NAMES, first=1)
def test_no_row_depends_on_which_questions_were_asked_before(name):
    methods = ("window", "ragged", "random", "h2o_decode", "full")
    prompts, cells = document(name), [one for one in grid((*NEW, "query_agnostic")) if one.cell.startswith(methods)]
    forward = asked(name, prompts, cells)
    for order in ((3, 0, 2, 1), (2,)):
        again = asked(name, prompts, cells, order)
        for key, one in again.items():
            common.assert_same([one], [forward[key]], ignore=PATH)


@cover.few("name", NAMES)
def test_a_question_about_a_shared_document_is_answered_as_stock_generate_answers_it(name):
    """Scores that know only the place of a token keep the same under every question, so the single run is the oracle."""
    methods = [common.registry()[method] for method in ("streamingllm", "local")] + [common.registry()["full"]]
    model, prompts = zoo.model(name), document(name)
    own = [common.cell(made, None if made.is_full else 12, "query_aware") for made in methods]
    singles = [common.alone(model, name, dataclasses.replace(prompt, document=None), own) for prompt in prompts]
    for rule in ("query_agnostic", *NEW):
        cells = [common.cell(made, None if made.is_full else 12, rule) for made in methods]
        answers = asked(name, prompts, cells)
        for number, single in enumerate(singles):
            for cell, alone in zip(cells, single, strict=True):
                forks = answers[number, cell.cell]
                same = ("token_ids", "kept_digest", "entries_resident", "entries_end", "entries_appended", "bytes_held")
                assert [getattr(forks, key) for key in same] == [getattr(alone, key) for key in same], (rule, cell.cell)


@pytest.mark.slow
def test_an_agnostic_compression_keeps_what_it_keeps_for_each_question_alone():
    for name in NAMES:
        prompts = document(name)
        cells = [cell for cell in grid(("query_agnostic",)) if not cell.cell.startswith("random")]
        together = asked(name, prompts, cells)
        alone = asked(name, [dataclasses.replace(prompt, document=None) for prompt in prompts], cells)
        for key, one in together.items():
            common.assert_same([one], [alone[key]], ignore=PATH | {"question_known"})


@pytest.mark.slow
def test_a_shared_agnostic_compression_keeps_what_a_run_of_its_own_keeps():
    """`sharing=off` compresses anew for every question, with the document's random stream."""
    name = "llama"
    prompts, cells = document(name), grid(("query_agnostic",))
    together = asked(name, prompts, cells)
    for number, prompt in enumerate(prompts):
        for cell, alone in zip(cells, common.alone(zoo.model(name), name, prompt, cells), strict=True):
            common.assert_same([together[number, cell.cell]], [alone], ignore=PATH | {"question_known"})


def test_a_joint_compression_keeps_the_entries_with_the_largest_mean_score():
    name, budget, window = "llama", 12, 4
    prompts = document(name)
    model, rule = zoo.model(name), protocol("query_aware")
    cell = common.cell(parts.window(window), budget, "query_joint")
    cut = prompts[0].context_tokens
    scores = []
    with Engine(model, common.family(name), common.rules(model), common.tokenizer()) as engine:
        for prompt in prompts:
            lengths = {cell.protocol: rule.lengths(prompt.length, cut)}
            made = prefill(engine.session, prompt, [cell], lengths, Meter(engine.device), 8)
            ((layers),) = made.scores.values()
            scores.append([layer[:, :cut].double() for layer in layers])
        (joint,) = engine.answer(prompts[2], [cell])
    for layer, kept in enumerate(joint.selected):
        mean = sum(one[layer] for one in scores) / QUESTIONS
        best = mean[:, : cut - window].topk(budget - window).indices
        for head, places in enumerate(kept.tolist()):
            assert places == sorted([*best[head].tolist(), *range(cut - window, cut)])


def test_equal_questions_make_first_joint_and_aware_one():
    name = "qwen2_5_vl"
    prompts = document(name)
    same = tuple(prompts[1] for _ in prompts)
    whole = dataclasses.replace(prompts[1].document, questions=same, paraphrases=same, generic=same[0])
    prompt = dataclasses.replace(prompts[1], document=whole)
    cells = [one for one in grid((*NEW, "query_aware")) if not one.cell.startswith("random")]
    answers = common.together(zoo.model(name), name, prompt, cells)
    digests: dict[str, set] = {}
    for cell, one in zip(cells, answers, strict=True):
        digests.setdefault(cell.cell.split("/")[0], set()).add((one.kept_digest, tuple(one.token_ids)))
    assert all(len(kept) == 1 for kept in digests.values()), digests


def test_what_cannot_share_a_compression_is_refused_or_has_one_of_its_own():
    name = "llama"
    prompts, model = document(name), zoo.model(name)
    oracle = common.registry(model=name)["oracle"]
    for rule in NEW:
        with pytest.raises(UnsupportedError, match="oracle scores by the answer"):
            oracle.check_no_answer(rule)
    own = common.cell(oracle, 12, "query_agnostic")
    answers = [common.together(model, name, prompt, [own])[0] for prompt in prompts]
    assert {one.status for one in answers} == {"ok"} and {one.compression_reused for one in answers} == {None}
    with pytest.raises(DataError, match="change the tokens of its context"):
        same_context([prompts[0], dataclasses.replace(prompts[1], context_tokens=5)], common.family(name))
