"""Counts of what a run feeds to the model besides decoding: prefills, contexts fed again, turns of conversations.

The counts follow `generation.engine`. If a document has several questions, most protocols compress the document once.
The questions then share one prefill, and for each (method, budget) setting one scoring and one selection.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from mmkv_bench.families.facts import ITEMSIZE

if TYPE_CHECKING:
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.plan import DatasetShare, Plan
    from mmkv_bench.protocols import Protocol


@dataclass
class Passes:
    """Numbers of prompts, or parts of prompts, that are fed to the model, besides decoding.

    Attributes:
        prefills: number of prefills of whole prompts or contexts, without streams.
        streams: cap (None without a limit) -> number of streams. All questions about a stream share one reading.
        replays: cell -> number of contexts fed again after their prefill, for this cell and the cells that share its
            scores.
        turns: cell -> number of a conversation's turns that are fed again.
    """

    prefills: int = 0
    streams: Counter[int | None] = field(default_factory=Counter)
    replays: Counter[Cell] = field(default_factory=Counter)
    turns: Counter[Cell] = field(default_factory=Counter)


def questions_per_document(part: DatasetShare) -> float | None:
    """Return a dataset's mean number of questions per document, as its file states (`about.samples`).

    1.0 for a dataset with one question per document, None if the file does not state the number.
    """
    if not part.spec.questions_key:
        return 1.0
    samples_match = re.match(r"(\d+) \((?:test, )?of (\d+) ", str(part.about.get("samples") or ""))
    return None if samples_match is None else int(samples_match[1]) / int(samples_match[2])


def passes(plan: Plan, part: DatasetShare, samples: int) -> Passes:
    """Count the prefills, streams, replays and turns that `samples` samples of a dataset need.

    The samples are assumed to include all questions of each document.
    """
    pass_counts = Passes()
    if not plan.answering.shares_prefill:
        for cell in part.cells:
            if cell.rule.streams:
                pass_counts.streams[_cap(cell)] += samples
            else:
                pass_counts.prefills += samples
        pass_counts.replays.update({cell: samples for cell in part.cells if _replays(cell)})
        return pass_counts
    questions_of_document = questions_per_document(part) or 1.0
    documents = math.ceil(samples / questions_of_document)
    has_several_questions = bool(part.spec.questions_key)
    prefill_sharing_cells: list[Cell] = []
    for name, rule in {cell.protocol: cell.rule for cell in part.cells}.items():
        cells = [cell for cell in part.cells if cell.protocol == name]
        if rule.streams:
            stream_cell_by_setting = {
                (cell.method, cell.reading, cell.budget, cell.seed, replace(cell.stream, ask_at=1.0)): cell
                for cell in cells
            }
            for cell in stream_cell_by_setting.values():
                pass_counts.streams[_cap(cell)] += documents
            continue
        if rule.apart:
            pass_counts.prefills += len(cells) * documents
            if rule.converses:
                pass_counts.turns.update(dict.fromkeys(cells, samples - documents))
            continue
        cells_for_all_questions = [
            cell for cell in cells if has_several_questions and rule.serves_all_questions(cell.compressor.needs.answer)
        ]
        other_cells = [cell for cell in cells if cell not in cells_for_all_questions]
        prefill_sharing_cells += other_cells
        if cells_for_all_questions:
            pass_counts.prefills += samples if rule.knows == "paraphrase" else documents
        pass_counts.replays.update(dict.fromkeys(_replaying_cells(other_cells), samples))
        pass_counts.replays.update(
            dict.fromkeys(
                _replaying_cells(cells_for_all_questions), samples if rule.knows == "paraphrase" else documents
            )
        )
    second_prefills = sum(cell.rule.prefills_again and cell.budget is not None for cell in prefill_sharing_cells)
    pass_counts.prefills += samples * (
        len({_prefill_key(plan, cell.rule) for cell in prefill_sharing_cells}) + second_prefills
    )
    return pass_counts


def caches_held(plan: Plan) -> tuple[int, int]:
    """Return how many full document caches a run holds while it decodes answers, and during one more prefill.

    If all questions of a document share a cache, it stays until the next document is prefilled under the same protocol.
    """
    multi_question_datasets = {part.dataset for part in plan.parts if part.spec.questions_key}
    rule_by_protocol = {cell.protocol: cell.rule for cell in plan.cells if cell.dataset in multi_question_datasets}
    rules_for_all_questions = [
        rule for rule in rule_by_protocol.values() if rule.serves_all_questions(reads_answer=False)
    ]
    if not rules_for_all_questions or not plan.answering.shares_prefill:
        return 0, 0
    return len(rules_for_all_questions), len(rules_for_all_questions) - 1


def observed_bytes(plan: Plan, tokens: int, hidden: int) -> int:
    """Return the bytes of attention statistics that a run holds while a document is prefilled for all of its questions.

    A layer's statistics are usually freed after the layer. Under `query_joint` those of all layers stay until the last
    question was fed behind the document.

    tokens: tokens of the document. hidden: size of the attention modules' input.
    """
    multi_question_datasets = {part.dataset for part in plan.parts if part.spec.questions_key}
    cells = [cell for cell in plan.cells if cell.dataset in multi_question_datasets and cell.rule.knows == "joint"]
    if not cells or plan.family is None or not plan.answering.shares_prefill:
        return 0
    needs = reduce(or_, (cell.compressor.needs for cell in cells))
    family, itemsize = plan.family, ITEMSIZE[plan.cells[0].dtype]
    heads, head_dim = family.num_query_heads, family.head_dim
    bytes_per_layer = (tokens * needs.queries + min(needs.tail_queries, tokens)) * heads * head_dim * itemsize
    bytes_per_layer += tokens * needs.states * hidden * itemsize
    bytes_per_layer += tokens * needs.column_sums * family.num_kv_heads * ITEMSIZE["float32"]
    bytes_per_layer += needs.query_moments * heads * head_dim * (head_dim + 1) * ITEMSIZE["float64"]
    bytes_per_layer += (needs.hidden_moments or needs.hidden_scalars) * 2 * hidden * ITEMSIZE["float64"]
    rotation_bytes = tokens * needs.states * 2 * head_dim * itemsize  # the layers share it
    return family.num_layers * bytes_per_layer + rotation_bytes


def notes_of(plan: Plan) -> list[str]:
    """Return a sentence for each dataset whose number of documents is unknown until its data are opened."""
    return [
        f"the number of questions per document of {part.dataset} is known only from its data: every question counts as a document"
        for part in plan.parts
        if questions_per_document(part) is None and any(cell.rule.knows != "own" for cell in part.cells)
    ]


def _cap(cell: Cell) -> int | None:
    return None if cell.budget is None else cell.budget.entries


def _prefill_key(plan: Plan, rule: Protocol) -> tuple[int, int]:
    """Return what a protocol prefills of four tokens, two of them context; equal for protocols that share a prefill."""
    lengths = rule.lengths(4, 2)
    # A recurrent state belongs to one position in the prompt.
    has_states = plan.family is not None and bool(plan.family.states.layers)
    return lengths.prefilled, lengths.candidates if has_states else 0


def _replaying_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell for each scorer that needs the context fed again."""
    return list({cell.compressor.eviction.scorer: cell for cell in cells if _replays(cell)}.values())


def _replays(cell: Cell) -> bool:
    return cell.budget is not None and cell.compressor.needs.replay
