"""What became of the answers to a dataset's documents: held once, however many answers it became of."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD = 1 << 17  # different answers beyond which those that no block of cells asked about lately are forgotten

_PLAIN = (float, int, bool, str, type(None))


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Of one answer: metric -> score, metric -> parts, and what the scorer returned for each filter. Only itself is equal."""

    values: Mapping[str, float]
    parts: Mapping[str, tuple[float, ...]]
    returned: Sequence[Mapping[str, Any]]


class Outcomes:
    """Those of answers to the documents `doc_ids`. An answer that was asked about after the last but one `make_room` is there."""

    def __init__(self, doc_ids: Iterable[int]) -> None:
        self._late: dict[int, dict[str, Outcome]] = {doc_id: {} for doc_id in doc_ids}
        self._early: dict[int, dict[str, Outcome]] = {}
        self._count = 0
        self._same: dict[Hashable, Outcome] = {}

    def __contains__(self, doc_id: int) -> bool:
        return doc_id in self._late

    def unknown(self, doc_id: int, texts: Iterable[str]) -> list[str]:
        """The answers to a document that have no outcome; those of the others stay."""
        late, early = self._late[doc_id], self._early.get(doc_id, {})
        new = []
        for text in texts:
            if text in late:
                continue
            if text in early:
                late[text] = early[text]
                self._count += 1
            else:
                new.append(text)
        return new

    def put(self, doc_id: int, text: str, outcome: Outcome) -> None:
        key = _key(outcome)
        self._late[doc_id][text] = outcome if key is None else self._same.setdefault(key, outcome)
        self._count += 1

    def of(self, doc_id: int, text: str) -> Outcome:
        return self._late[doc_id][text]

    def make_room(self) -> None:
        """Where they are many, those that nobody asked about since the last time are forgotten."""
        if self._count > HELD:
            self._late, self._early = {doc_id: {} for doc_id in self._late}, self._late
            self._count = 0
            self._same = {}


def _key(outcome: Outcome) -> Hashable | None:
    """Equal for outcomes that nothing tells apart; None where a value may be anything."""
    returned = [list(own.items()) for own in outcome.returned]
    if not all(type(value) in _PLAIN for own in returned for _, value in own):
        return None
    told = [[(name, type(value), _told(value)) for name, value in own] for own in returned]
    values = [(name, _told(value)) for name, value in outcome.values.items()]
    parts = [(name, *map(_told, own)) for name, own in outcome.parts.items()]
    return tuple(map(tuple, told)), tuple(values), tuple(parts)


def _told(value: Any) -> Any:
    """Minus zero is no zero, and nan is nan."""
    return value.hex() if type(value) is float else value
