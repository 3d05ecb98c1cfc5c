"""Whether the margins were fixed before a row was made: its commit holds them, as they stand here.

What a commit holds is there in every commit that it is an ancestor of, so that a row is judged by the version whose commit is
an ancestor of its own. Of a row without a commit (an installed wheel), and of a commit that this checkout does not have, nobody
can say; then the row is shown and not judged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmkv_bench.config.schema import reference_dir
from mmkv_bench.store.provenance import committed

FILE = "results/reference/margins.yaml"


@dataclass(frozen=True)
class Version:
    """A version of the margins; `fixed`: the day, `measured`: cells of real weights that there were then."""

    version: int
    fixed: str
    measured: int
    change: str


@cache
def versions() -> tuple[Version, ...]:
    """All of them, the one that judges last."""
    return tuple(Version(**{**one, "fixed": str(one["fixed"])}) for one in _here()["versions"])


@cache
def unjudged(commit: str | None) -> str:
    """Why a row of a commit is not judged; empty where it is."""
    here, now = _here(), versions()[-1]
    text = committed(FILE, commit) if commit else None
    if text is None:
        return f"which margins its commit ({(commit or 'none')[:12]}) had is not known here"
    then = _read(text)
    if then.get("version", 1) != here["version"]:
        return f"its commit {str(commit)[:12]} is older than version {now.version} of the margins ({now.fixed})"
    same = then.get("metrics") == here["metrics"]
    return "" if same else f"its commit {str(commit)[:12]} has other margins of version {now.version}"


@cache
def _here() -> Mapping[str, Any]:
    return _read((reference_dir() / "margins.yaml").read_text(encoding="utf-8"))


def _read(text: str) -> Mapping[str, Any]:
    import yaml

    found: Mapping[str, Any] = yaml.safe_load(text) or {}
    return found
