"""What became of the answers to a dataset's documents: held once, however many answers it became of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD = 1 << 17  # different answers beyond which those are forgotten that the cells scored next did not give
KINDS = 1 << 12  # different outcomes that are looked for again; where there are more, few are alike

_PLAIN = (float, int, bool, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Of one answer: metric -> score, metric -> parts, and what the scorer returned for each filter. Only itself is equal."""

    values: Mapping[str, float]
    parts: Mapping[str, tuple[float, ...]]
    returned: Sequence[Mapping[str, Any]]


class Outcomes:
    """Those of answers to the documents `doc_ids`; outcomes that nothing tells apart are one object."""

    def __init__(self, doc_ids: Iterable[int]) -> None:
        self._held: dict[int, dict[str, Outcome]] = {doc_id: {} for doc_id in doc_ids}
        self._kinds: dict[Hashable, Outcome] = {}

    def __contains__(self, doc_id: int) -> bool:
        return doc_id in self._held

    def unknown(self, asked: Mapping[int, Iterable[str]]) -> dict[int, list[str]]:
        """Of answers, doc_id -> texts, those without an outcome. The others' stay; where many are held, no others do."""
        new = {doc_id: [text for text in texts if text not in self._held[doc_id]] for doc_id, texts in asked.items()}
        if sum(map(len, self._held.values())) > HELD:
            self._held = {
                doc_id: {text: own[text] for text in asked.get(doc_id, ()) if text in own}
                for doc_id, own in self._held.items()
            }
        return new

    def put(self, doc_id: int, text: str, outcome: Outcome) -> None:
        key = _key(outcome)
        if key is not None and (key in self._kinds or len(self._kinds) < KINDS):
            outcome = self._kinds.setdefault(key, outcome)
        self._held[doc_id][text] = outcome

    def of(self, doc_id: int, text: str) -> Outcome:
        return self._held[doc_id][text]


def _key(outcome: Outcome) -> Hashable | None:
    """Equal for outcomes that nothing tells apart; None where a value may be anything."""
    returned = [list(own.items()) for own in outcome.returned]
    if not all(type(value) in _PLAIN for own in returned for _, value in own):
        return None
    told = [[(name, type(value), _told(value)) for name, value in own] for own in returned]
    values = [(name, type(value), _told(value)) for name, value in outcome.values.items()]
    parts = [(name, *map(_told, own)) for name, own in outcome.parts.items()]
    return tuple(map(tuple, told)), tuple(values), tuple(parts)


def _told(value: Any) -> Any:
    """Minus zero is no zero, and nan is nan."""
    return value.hex() if type(value) is float else value
