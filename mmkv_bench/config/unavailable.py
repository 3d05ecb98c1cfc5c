"""Models that cannot be run (`unavailable.yaml`). Asking for such a model by name (`model=longva_7b`) gives the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmkv_bench.declared import declared
from mmkv_bench.errors import folded


@dataclass(frozen=True)
class Unavailable:
    """A model that cannot be run. `unavailable.yaml` explains the fields."""

    title: str
    repository: str
    papers: str
    why: str
    needed: str
    instead: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def sentence(self, name: str) -> str:
        """Return the error message for `model=<name>`."""
        text = f"model={name} cannot be run: {self.title} ({self.repository}) {self.why}; it would need {self.needed}"
        return f"{text}; the nearest that runs is model={' or model='.join(self.instead)}" if self.instead else text


def _read(fields: dict[str, Any]) -> Unavailable:
    return Unavailable(**fields | {key: tuple(fields.get(key, ())) for key in ("instead", "aliases")})


UNAVAILABLE = {name: _read(fields) for name, fields in declared(__file__).items()}


def find(name: str) -> Unavailable | None:
    """Return the model with this name, in any spelling with the same letters and digits, or None."""
    wanted = folded(name)
    for key, model in UNAVAILABLE.items():
        if wanted in (folded(key), *map(folded, model.aliases)):
            return model
    return None
