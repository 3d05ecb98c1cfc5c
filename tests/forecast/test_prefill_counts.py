"""Promise: prefills, replays and turns that a plan counts are those that the engine makes, counted at the text model."""

from __future__ import annotations

from weakref import WeakSet

import pytest
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from mmkv_bench.compression.session import Session
from mmkv_bench.config.compose import compose
from mmkv_bench.forecast.prefill_counts import caches_held, observed_bytes, passes, questions_per_document
from mmkv_bench.plan.planner import outline
from tests.each import each
from tests.run.setting import done
from tests.run.test_cut_prompt import MODEL

PAGES = ("dataset=pages_questions", "fidelity=off", "dataset.generation.max_new_tokens=2", "stage=generate")
RECORDS = ("dataset=questions_records", "fidelity=off", "dataset.generation.max_new_tokens=2", "stage=generate", *MODEL)


class Reads:
    """Pieces of more than one token that a text model was fed: into an empty cache, beside it (a replay), or behind entries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.prefills = self.replays = self.behind = 0
        for model in (Qwen2_5_VLTextModel, LlamaModel):
            monkeypatch.setattr(model, "forward", self._counting(model.forward))

    def _counting(self, forward):
        def counting(model, *args, **kwargs):
            fed = kwargs["input_ids"] if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
            cache = kwargs["past_key_values"]
            if fed.shape[1] > 1:
                beside = type(cache.layers[0]).__name__ == "_ReplayLayer"
                self.replays += beside
                self.prefills += not beside and cache.get_seq_length() == 0
                self.behind += not beside and cache.get_seq_length() > 0
            return forward(model, *args, **kwargs)

        return counting


@pytest.mark.slow
@each(
    ("words", "prefills", "replays", "turns"),
    [
        # a page of four questions: anew 4, otherwise once. Budgets share what is fed again.
        (
            (
                *PAGES,
                "method=[kvzip]",
                "budget=[32,64]",
                "protocol=[query_aware,query_first,query_joint,query_generic,query_agnostic]",
                "limit=4",
            ),
            4 + 1 + 1 + 1 + 1,
            4 + 1 + 1 + 1 + 1,
            0,
        ),
        # two pages. A conversation a cell: a page is prefilled once, and three of its turns are fed again
        ((*PAGES, "method=[snapkv]", "budget=32", "protocol=turns", "limit=8"), 2 * 2, 0, 2 * 6),
        # whole prompts share a prefill, whichever part can be kept; masked makes another for its cell
        (
            (
                *PAGES,
                "method=[snapkv]",
                "budget=32",
                "protocol=[paper,strict,masked,query_aware,query_agnostic]",
                "limit=4",
            ),
            4 + 4 + 1,
            0,
            0,
        ),
        ((*PAGES, "method=[kvzip]", "budget=32", "protocol=query_agnostic", "sharing=off", "limit=4"), 2 * 4, 4, 0),
        (
            (*RECORDS, "method=[snapkv]", "budget=10%", "protocol=[query_paraphrase,query_first]", "limit=8"),
            8 + 2,
            0,
            0,
        ),
    ],
    keep=3,
)
def test_a_plan_counts_what_the_engine_reads(words, prefills, replays, turns, tmp_path, monkeypatch):
    plan = outline(compose([*words, f"out={tmp_path}"]))
    (part,) = plan.parts
    assert questions_per_document(part) == 4 and len(part.samples) in (4, 8)
    made, reads = passes(plan, part, len(part.samples)), Reads(monkeypatch)
    done(tmp_path, *words)
    assert (made.prefills, made.replays.total(), made.turns.total()) == (prefills, replays, turns)
    assert (reads.prefills, reads.replays) == (made.prefills, made.replays.total())
    if turns:  # each turn's question is fed by itself
        assert reads.behind == made.turns.total() + len(part.samples) * len(part.cells)


@pytest.mark.slow
@each(
    ("protocols", "answering", "prefilling"),
    [
        ("query_first,query_generic", 2, 1),
        ("query_first,query_joint,query_agnostic", 3, 2),
    ],
)
def test_a_run_holds_as_many_whole_caches_of_documents_as_its_plan_says(
    protocols, answering, prefilling, tmp_path, monkeypatch
):
    words = (*PAGES, "method=[snapkv]", "budget=32", f"protocol=[{protocols}]", "limit=8")
    assert caches_held(outline(compose([*words, f"out={tmp_path}"]))) == (answering, prefilling)
    caches, most = WeakSet(), {"answering": 0, "prefilling": 0}
    new_cache, forward = Session.new_cache, Qwen2_5_VLTextModel.forward

    def recorded(session, *args):
        made = new_cache(session, *args)
        caches.add(made)
        return made

    def counting(model, *args, **kwargs):
        place = "answering" if kwargs["past_key_values"].get_seq_length() else "prefilling"
        most[place] = max(most[place], sum(one.get_seq_length() > 200 for one in caches))
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(Session, "new_cache", recorded)
    monkeypatch.setattr(Qwen2_5_VLTextModel, "forward", counting)
    done(tmp_path, *words)
    assert most == {"answering": answering, "prefilling": prefilling}


@pytest.mark.slow
def test_what_is_held_of_a_document_until_its_last_question_has_the_bytes_that_a_plan_says(tmp_path, monkeypatch):
    """Queries, inputs, column sums, tails and moments of every layer."""
    held: list[tuple[int, int]] = []
    observe_rest = Session.observe_rest

    def noted(session, listener, context, *args):
        seen = [one for row in context.observations.values() for one in row]
        tensors = [one for each in seen for one in (each._tail, each._columns, *sum(each._pieces.values(), []))]
        tensors += [getattr(each._queries, name) for each in seen if each._queries for name in ("_sum", "_products")]
        tensors += [getattr(each._hidden, name) for each in seen if each._hidden for name in ("_sum", "_squares")]
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors if one is not None
        }
        held.append((seen[0]._seen, sum(storages.values())))
        return observe_rest(session, listener, context, *args)

    monkeypatch.setattr(Session, "observe_rest", noted)
    methods = "method=[meda,snapkv,h2o,expected_attention,mmshift,flashcache]"
    words = (*PAGES, methods, "flashcache.keys=unrotated", "budget=32", "limit=4")
    plan, hidden = outline(compose([*words, "protocol=query_joint", f"out={tmp_path}"])), 128
    done(tmp_path, *words, "protocol=query_joint")
    assert len(held) == 4 and len({*held}) == 1
    tokens, nbytes = held[0]
    assert observed_bytes(plan, tokens, hidden) == nbytes
    first = outline(compose([*words, "protocol=query_first", f"out={tmp_path}"]))
    assert observed_bytes(first, tokens, hidden) == 0
