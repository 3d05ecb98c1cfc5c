"""How much of a product of axes a test runs: a few combinations per case in `make test`, all in `make test-full`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest


def spread(names: Iterable[Any], *axes: Iterable[Any], each: int = 2) -> dict[Any, list[tuple]]:
    """`each` combinations of the axes for every name: as different as can be for one name, and over the names every
    combination as often as every other. Always the same for the same arguments."""
    product, used, found = list(itertools.product(*axes)), Counter(), {}
    for name in names:
        chosen: list[int] = []
        for _ in range(min(each, len(product))):
            chosen.append(min(set(range(len(product))) - set(chosen), key=lambda i: _cost(product, chosen, used, i)))
            used[chosen[-1]] += 1
        found[name] = [product[i] for i in chosen]
    return found


def _cost(product: Sequence[tuple], chosen: Sequence[int], used: Counter, i: int) -> tuple[int, int, int]:
    shared = sum(a == b for other in chosen for a, b in zip(product[i], product[other], strict=True))
    return shared, used[i], i


def cases(names: Iterable[Any], *axes: Iterable[Any], each: int = 2, keep: int | None = None) -> pytest.MarkDecorator:
    """Parametrises `name` and `combinations`: those of `spread`, and the whole product in a case marked full. Where all
    names say the same thing, `keep` of them, spread evenly, stand for the others."""
    names, axes = list(names), [list(axis) for axis in axes]
    whole = list(itertools.product(*axes))
    left = range(len(names)) if keep is None else [i * len(names) // keep for i in range(keep)]
    some = [
        pytest.param(name, few, id=str(name))
        for i, (name, few) in enumerate(spread(names, *axes, each=each).items())
        if i in left
    ]
    full = [pytest.param(name, whole, id=f"{name}-whole", marks=pytest.mark.full) for name in names]
    return pytest.mark.parametrize(("name", "combinations"), some + full)


@contextlib.contextmanager
def case(*what: Any) -> Iterator[None]:
    """A failure inside names its combination."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise


def few(names: str | Sequence[str], values: Iterable[Any], keep: int = 1, first: int = 0) -> pytest.MarkDecorator:
    """Parametrises over values that all say the same thing: `keep` of them, spread evenly from number `first`, and in
    `make test-full` all of them."""
    values = list(values)
    kept = {(first + i * len(values) // keep) % len(values) for i in range(keep)}
    several = not isinstance(names, str) or "," in names
    marked = [pytest.param(*value if several else (value,), marks=pytest.mark.full) for value in values]
    return pytest.mark.parametrize(names, [value if i in kept else marked[i] for i, value in enumerate(values)])


def shares(share: int) -> pytest.MarkDecorator:
    """Parametrises `share` for a test that takes a turn of a list with `turn`: one in `share` of it, and in `make test-full`
    all of it."""
    return pytest.mark.parametrize(
        "share", [pytest.param(share, id="some"), pytest.param(1, id="whole", marks=pytest.mark.full)]
    )


def examples(whole: int) -> int:
    """How many examples of a property are drawn: so many in `make test-full`, two fifths of them in `make test`."""
    return whole if "MMKV_TEST_FULL" in os.environ else max(20, whole * 2 // 5)


def turn(items: Iterable[Any], number: int, share: int) -> list[Any]:
    """Every `share`-th item, from number `number` on: `share` turns one after the other have them all."""
    return list(items)[number % share :: share]
