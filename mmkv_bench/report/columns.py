"""Numbers and texts as scripts hold them: rounded, each text once, null for what is not there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

DIGITS = 6


def number(value: Any) -> float | int | None:
    """A number with six digits, whole ones as they are; None for null, NaN and infinities."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value
    value = float(value)
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


class Texts:
    """A column of texts: the different ones, in the order in which they came, and each row's place among them."""

    def __init__(self) -> None:
        self._places: dict[str | None, int] = {}
        self.codes: list[int] = []

    def add(self, text: str | None) -> None:
        self.codes.append(self._places.setdefault(text, len(self._places)))

    def plain(self) -> dict[str, list[Any]]:
        """{"of": the texts, "at": the rows' places}."""
        return {"of": list(self._places), "at": self.codes}


class Columns:
    """Rows that are added one by one and written column by column; texts: the columns of names."""

    def __init__(self, texts: Sequence[str], others: Sequence[str]) -> None:
        self._texts = {name: Texts() for name in texts}
        self._others: dict[str, list[Any]] = {name: [] for name in others}
        self.n = 0

    def add(self, **row: Any) -> None:
        for name, column in self._texts.items():
            column.add(row.pop(name))
        for name, values in self._others.items():
            values.append(number(row[name]) if isinstance(row[name], float) else row[name])
            del row[name]
        assert not row, f"columns that nobody named: {', '.join(row)}"
        self.n += 1

    def value(self, name: str, row: int) -> Any:
        """A value of a column that is none of texts."""
        return self._others[name][row]

    def put(self, name: str, row: int, value: Any) -> None:
        """Another value in its place."""
        self._others[name][row] = value

    def plain(self) -> dict[str, Any]:
        """Name -> the column; of texts as `Texts.plain` gives it."""
        return {name: column.plain() for name, column in self._texts.items()} | self._others


def numbers(values: Iterable[Any]) -> list[float | int | None]:
    """`number` of each."""
    return [number(value) for value in values]
