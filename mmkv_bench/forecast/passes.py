"""What a run's samples make the model read besides decoding: prefills, contexts fed again, turns of conversations.

Counted as `generation.engine` makes them. A document with several questions is compressed once under most protocols that know
of them; its questions then share one prefill, one scoring and one selection a cell.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mmkv_bench.protocols import Protocol, protocol

if TYPE_CHECKING:
    from mmkv_bench.plan.cells import Cell
    from mmkv_bench.plan.plan import DatasetShare, Plan


@dataclass
class Passes:
    """Number of times that prompts are read.

    Attributes:
        prefills: prompts, whole or their contexts, without streams.
        streams: cap, or None without a limit -> streams read, each once for all its questions and all places where they come.
        replays: cell -> contexts that are fed again behind their prefill, for it and those that share its scores.
        turns: cell -> turns that are fed again, at the end of a conversation.
    """

    prefills: int = 0
    streams: Counter[int | None] = field(default_factory=Counter)
    replays: Counter[Cell] = field(default_factory=Counter)
    turns: Counter[Cell] = field(default_factory=Counter)


def questions_per_document(part: DatasetShare) -> float | None:
    """Return the mean number of questions about one document, as the dataset's file states its samples (`about.samples`).

    Returns:
        1.0 for a dataset without documents of several questions, None where the file does not tell.
    """
    if not part.spec.questions_key:
        return 1.0
    stated = re.match(r"(\d+) \((?:test, )?of (\d+) ", str(part.about.get("samples") or ""))
    return None if stated is None else int(stated[1]) / int(stated[2])


def passes(plan: Plan, part: DatasetShare, samples: int) -> Passes:
    """Count what is read for `samples` of a dataset, all questions of their documents among them."""
    made = Passes()
    if not plan.answering.shares_prefill:
        for cell in part.cells:
            if protocol(cell.protocol).streams:
                made.streams[_cap(cell)] += samples
            else:
                made.prefills += samples
        made.replays.update({cell: samples for cell in part.cells if _replays(cell)})
        return made
    size = questions_per_document(part) or 1.0
    documents = math.ceil(samples / size)
    several = bool(part.spec.questions_key)
    shared: list[Cell] = []
    for name, rule in {cell.protocol: protocol(cell.protocol) for cell in part.cells}.items():
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
            made.prefills += samples if rule.knows in ("joint", "paraphrase") else documents
        made.replays.update(dict.fromkeys(_replaying(others), samples))
        made.replays.update(dict.fromkeys(_replaying(once), samples if rule.knows == "paraphrase" else documents))
    again = sum(protocol(cell.protocol).prefills_again and cell.budget is not None for cell in shared)
    made.prefills += samples * (len({_prefill_of(plan, protocol(cell.protocol)) for cell in shared}) + again)
    return made


def caches_held(plan: Plan) -> tuple[int, int]:
    """Return how many documents' whole caches a run holds while their questions are answered, and while one more is prefilled.

    A cache that all questions of a document share stays until the next document is prefilled under its protocol.
    """
    several = {part.dataset for part in plan.parts if part.spec.questions_key}
    rules = {cell.protocol: protocol(cell.protocol) for cell in plan.cells if cell.dataset in several}
    once = [rule for rule in rules.values() if rule.serves_all_questions(reads_answer=False)]
    if not once or not plan.answering.shares_prefill:
        return 0, 0
    joint = any(rule.knows == "joint" for rule in once)  # its first prompt's cache stays while the others are prefilled
    return len(once), len(once) - 1 + joint


def notes_of(plan: Plan) -> list[str]:
    """Return a sentence for each dataset whose documents are not counted, because only its data tell how many there are."""
    return [
        f"how many questions ask about a document of {part.dataset} is known only from its data: each is counted as a document"
        for part in plan.parts
        if questions_per_document(part) is None and any(protocol(cell.protocol).knows != "own" for cell in part.cells)
    ]


def _cap(cell: Cell) -> int | None:
    return None if cell.budget is None else cell.budget.entries


def _prefill_of(plan: Plan, rule: Protocol) -> tuple[int, int]:
    """Return what protocols that share a prefill agree in, of a prompt of four tokens, two of them context."""
    lengths = rule.lengths(4, 2)
    states = plan.family is not None and bool(plan.family.states.layers)  # states are those of one place in the prompt
    return lengths.prefilled, lengths.candidates if states else 0


def _replaying(cells: Sequence[Cell]) -> list[Cell]:
    """Return a cell for each scorer that has a context fed again for itself; cells of one protocol."""
    return list({cell.compressor.eviction.scorer: cell for cell in cells if _replays(cell)}.values())


def _replays(cell: Cell) -> bool:
    return cell.budget is not None and cell.compressor.needs.replay
