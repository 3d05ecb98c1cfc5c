"""Versions of a method's numbers that stand in one folder: a table shows the newest of each cell and says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Versions = dict[str, tuple[int, ...]]  # budget -> versions, the newest first


def several(found: Mapping[str, Iterable[tuple[str, int]]]) -> dict[str, Versions]:
    """Label -> versions by budget, of the lines that have more than one.

    found: label -> (budget, version) of each of its cells.
    """
    kept = {}
    for label, cells in found.items():
        versions: dict[str, set[int]] = {}
        for budget, version in cells:
            versions.setdefault(budget, set()).add(version)
        if len(set().union(*versions.values())) > 1:
            kept[label] = {budget: tuple(sorted(own, reverse=True)) for budget, own in versions.items()}
    return kept


def version_notes(versions: Mapping[str, Versions]) -> list[str]:
    """What a table leaves out because its numbers were mended, and lines whose budgets show different versions."""
    lines = []
    for label, budgets in versions.items():
        older = [
            f"{budget or 'all budgets'} (version {', '.join(map(str, own[1:]))}, shown: {own[0]})"
            for budget, own in budgets.items()
            if len(own) > 1
        ]
        if older:
            lines.append(f"{label}: older versions of its numbers are left out at {', '.join(older)}.")
        shown: dict[int, list[str]] = {}
        for budget, own in budgets.items():
            shown.setdefault(own[0], []).append(budget or "all budgets")
        if len(shown) > 1:
            words = " and ".join(f"{version} at {', '.join(of)}" for version, of in sorted(shown.items()))
            lines.append(f"{label}: its budgets show different versions of its numbers: {words}.")
    return lines
