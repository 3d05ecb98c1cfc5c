"""The budget of a cache: either entries per KV head, or a fraction of the prompt.

A budget in bytes becomes a number of entries once the model is known: full windows and recurrent states are subtracted,
and the rest is divided by the bytes of one entry per KV head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from mmkv_bench.errors import ConfigError

_ALLOWED = (
    "a whole number of entries per KV head >= 1 (budget=64), or a fraction kept in (0, 1] "
    "written with a point or a percent sign (budget=0.2, budget=1.0, budget=20%), or bytes of all state of a known model, with a "
    "unit (budget=64MiB, budget=48MB)"
)
UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
"""Bytes of a unit, in lower case."""
LARGEST = 2**63 - 1
"""Largest whole number that a column can store."""
# What int() and Decimal() read beyond this (other scripts' digits, underscores) is a typo in a budget.
_WHOLE = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_BYTES = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([a-zA-Z]+)")


@dataclass(frozen=True)
class StateCost:
    """Bytes of one sequence's state."""

    entry: int  # bytes of one entry per KV head, in all compressed layers
    beside: int = 0  # bytes of full windows and recurrent states, in the layers that are not compressed

    def entries(self, nbytes: int, text: str) -> int:
        """Return the number of entries per KV head that fit into `nbytes` of state. Raises ConfigError: none fit.

        text: the requested amount, for the message.
        """
        if (entries := (nbytes - self.beside) // self.entry) < 1:
            raise ConfigError(
                f"budget={text} leaves no entry: windows and recurrent states of this model hold {self.beside:,} bytes and one "
                f"entry per KV head {self.entry:,}; allowed: {self.beside + self.entry:,} bytes or more"
            )
        return entries


@dataclass(frozen=True)
class Budget:
    """A requested budget: entries per KV head, or a fraction. `1` is one entry, `1.0` everything; neither becomes the other.

    in_bytes: the text of a budget that was requested in bytes; `entries` is then the number of entries that it allows.
    """

    kind: Literal["entries", "fraction"]
    entries: int | None = None
    fraction: Decimal | None = None
    in_bytes: str | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, value: object, cost: StateCost | None = None) -> Budget:
        """Return the budget that a config value describes.

        Args:
            value: int (entries per KV head), float or decimal text or percent text (fraction kept), or text with a unit of bytes.
            cost: the model's cost in bytes; None if it is not known.

        Raises:
            ConfigError: anything else, 0, negative numbers and fractions above 1; bytes without a model, or too few bytes.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
            raise ConfigError(f"budget={value!r} is not a budget; allowed: {_ALLOWED}")
        text = str(value).strip()
        if _WHOLE.fullmatch(text):
            entries = int(text)
            if entries < 1:
                raise ConfigError(f"budget={text} keeps nothing; allowed: {_ALLOWED}")
            if entries > LARGEST:
                raise ConfigError(f"budget={text} is more than rows can store ({LARGEST}); allowed: {_ALLOWED}")
            return cls("entries", entries=entries)
        if (amount := _BYTES.fullmatch(text)) and amount[2].lower() in UNITS:
            nbytes = int(Decimal(amount[1]) * UNITS[amount[2].lower()])
            if nbytes < 1:
                raise ConfigError(f"budget={text} keeps nothing; allowed: {_ALLOWED}")
            if cost is None:
                raise ConfigError(
                    f"budget={text} is in bytes, but the model's shape is unknown, so bytes cannot be converted "
                    "into entries; allowed: entries per KV head or a fraction"
                )
            entries = cost.entries(nbytes, text)
            if entries > LARGEST:
                raise ConfigError(f"budget={text} is more than rows can store ({LARGEST} entries); allowed: {_ALLOWED}")
            return cls("entries", entries=entries, in_bytes=text)
        percent = text.endswith("%")
        number = text.removesuffix("%").strip()
        if not _DECIMAL.fullmatch(number):
            raise ConfigError(f"budget={text!r} is not a budget; allowed: {_ALLOWED}")
        fraction = Decimal(number) / 100 if percent else Decimal(number)
        if not 0 < fraction <= 1:
            raise ConfigError(f"budget={text} is neither whole entries nor a fraction in (0, 1]; allowed: {_ALLOWED}")
        return cls("fraction", fraction=fraction.normalize())

    def entries_for(self, length: int) -> int:
        """Return C, the entries per KV head for a prompt of `length` tokens.

        A fraction of the length is rounded down in exact decimal arithmetic, to at least one entry.
        """
        if self.entries is not None:
            return self.entries
        numerator, denominator = self._kept.as_integer_ratio()
        return max(1, numerator * length // denominator)

    @property
    def asked(self) -> Fraction | None:
        """The requested fraction of the prompt, exact; None for a budget in entries."""
        return None if self.fraction is None else Fraction(self.fraction)

    @property
    def _kept(self) -> Decimal:
        assert self.fraction is not None, "a budget is a number of entries or a fraction"
        return self.fraction

    @property
    def fraction_text(self) -> str | None:
        """The exact decimal text of a fraction; None for a budget in entries."""
        return None if self.fraction is None else format(self.fraction, "f")

    def __str__(self) -> str:
        return str(self.entries) if self.kind == "entries" else f"{(self._kept * 100).normalize():f}%"
