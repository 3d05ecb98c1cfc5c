"""Counts of what a run feeds to the model besides decoding: prefills, contexts fed again, turns of conversations.

The counts follow `generation.engine`. Under most protocols that use several questions of a document, the document is
compressed once. Its questions then share one prefill, and per cell one scoring and one selection.
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
    """How often prompts or parts of them are fed to the model, besides decoding.

    Attributes:
        prefills: number of prefills of whole prompts or contexts, without streams.
        streams: cap (None without a limit) -> number of streams. All questions about a stream share one reading.
        replays: cell -> number of contexts fed again after their prefill, for this cell and the cells that share its scores.
        turns: cell -> number of a conversation's turns that are fed again.
    """

    prefills: int = 0
    streams: Counter[int | None] = field(default_factory=Counter)
    replays: Counter[Cell] = field(default_factory=Counter)
    turns: Counter[Cell] = field(default_factory=Counter)


def questions_per_document(part: DatasetShare) -> float | None:
    """Return a dataset's mean number of questions per document, from the dataset's file (`about.samples`).

    Returns:
        1.0 for a dataset with one question per document, None if the file does not state the number.
    """
    if not part.spec.questions_key:
        return 1.0
    stated = re.match(r"(\d+) \((?:test, )?of (\d+) ", str(part.about.get("samples") or ""))
    return None if stated is None else int(stated[1]) / int(stated[2])


def passes(plan: Plan, part: DatasetShare, samples: int) -> Passes:
    """Count the prefills and replays that `samples` samples of a dataset need.

    The samples are assumed to include all questions of each document.
    """
    made = Passes()
    if not plan.answering.shares_prefill:
        for cell in part.cells:
            if cell.rule.streams:
                made.streams[_cap(cell)] += samples
            else:
                made.prefills += samples
        made.replays.update({cell: samples for cell in part.cells if _replays(cell)})
        return made
    size = questions_per_document(part) or 1.0
    documents = math.ceil(samples / size)
    several = bool(part.spec.questions_key)
    shared: list[Cell] = []
    for name, rule in {cell.protocol: cell.rule for cell in part.cells}.items():
        cells = [cell for cell in part.cells if cell.protocol == name]
        if rule.streams:
            readings = {
                (cell.method, cell.reading, cell.budget, cell.seed, replace(cell.stream, ask_at=1.0)): cell
                for cell in cells
            }
            for cell in readings.values():
                made.streams[_cap(cell)] += documents
            continue
        if rule.apart:
            made.prefills += len(cells) * documents
            if rule.converses:
                made.turns.update(dict.fromkeys(cells, samples - documents))
            continue
        once = [cell for cell in cells if several and rule.serves_all_questions(cell.compressor.needs.answer)]
        others = [cell for cell in cells if cell not in once]
        shared += others
        if once:
            made.prefills += samples if rule.knows == "paraphrase" else documents
        made.replays.update(dict.fromkeys(_replaying(others), samples))
        made.replays.update(dict.fromkeys(_replaying(once), samples if rule.knows == "paraphrase" else documents))
    again = sum(cell.rule.prefills_again and cell.budget is not None for cell in shared)
    made.prefills += samples * (len({_prefill_of(plan, cell.rule) for cell in shared}) + again)
    return made


def caches_held(plan: Plan) -> tuple[int, int]:
    """Return the number of full document caches that a run holds while questions are answered, and the number during one more
    prefill.

    If all questions of a document share a cache, it stays until the next document is prefilled under the same protocol.
    """
    several = {part.dataset for part in plan.parts if part.spec.questions_key}
    rules = {cell.protocol: cell.rule for cell in plan.cells if cell.dataset in several}
    once = [rule for rule in rules.values() if rule.serves_all_questions(reads_answer=False)]
    if not once or not plan.answering.shares_prefill:
        return 0, 0
    return len(once), len(once) - 1


def observed_bytes(plan: Plan, tokens: int, hidden: int) -> int:
    """Return the memory of attention statistics that a run holds while a document is prefilled for all of its questions
    [bytes].

    What scorers read of a layer is usually freed after the layer. Under `query_joint` the statistics of every layer stay
    until the last question was fed behind the document.

    Args:
        tokens: tokens of the document.
        hidden: size of the attention modules' input.
    """
    several = {part.dataset for part in plan.parts if part.spec.questions_key}
    cells = [cell for cell in plan.cells if cell.dataset in several and cell.rule.knows == "joint"]
    if not cells or plan.family is None or not plan.answering.shares_prefill:
        return 0
    needs = reduce(or_, (cell.compressor.needs for cell in cells))
    family, itemsize = plan.family, ITEMSIZE[plan.cells[0].dtype]
    heads, width = family.num_query_heads, family.head_dim
    layer = (tokens * needs.queries + min(needs.tail_queries, tokens)) * heads * width * itemsize
    layer += tokens * needs.states * hidden * itemsize
    layer += tokens * needs.column_sums * family.num_kv_heads * ITEMSIZE["float32"]
    layer += needs.query_moments * heads * width * (width + 1) * ITEMSIZE["float64"]
    layer += (needs.hidden_moments or needs.hidden_scalars) * 2 * hidden * ITEMSIZE["float64"]
    rotation = tokens * needs.states * 2 * width * itemsize  # the layers share it
    return family.num_layers * layer + rotation


def notes_of(plan: Plan) -> list[str]:
    """Return a sentence for each dataset whose number of documents is unknown until its data are opened."""
    return [
        f"the number of questions per document of {part.dataset} is known only from its data: every question counts as a document"
        for part in plan.parts
        if questions_per_document(part) is None and any(cell.rule.knows != "own" for cell in part.cells)
    ]


def _cap(cell: Cell) -> int | None:
    return None if cell.budget is None else cell.budget.entries


def _prefill_of(plan: Plan, rule: Protocol) -> tuple[int, int]:
    """Return a key that is equal for protocols that can share a prefill.

    The key is what the protocol prefills of a prompt of four tokens, two of which are context.
    """
    lengths = rule.lengths(4, 2)
    # A recurrent state belongs to one position in the prompt.
    states = plan.family is not None and bool(plan.family.states.layers)
    return lengths.prefilled, lengths.candidates if states else 0


def _replaying(cells: Sequence[Cell]) -> list[Cell]:
    """Return one cell for each scorer that needs the context fed to the model again. cells: cells of one protocol."""
    return list({cell.compressor.eviction.scorer: cell for cell in cells if _replays(cell)}.values())


def _replays(cell: Cell) -> bool:
    return cell.budget is not None and cell.compressor.needs.replay
