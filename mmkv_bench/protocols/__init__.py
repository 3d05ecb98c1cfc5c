"""Protocols: what is prefilled, reduced and fed again, and where an answer's first token comes from. One file each.

A protocol is a file of this folder with one subclass of `Protocol`; every place that must know about protocols asks that
object. The order of `NAMES` is the alphabet, diagnostics last; `CUTTING` are those that cut a prompt behind its visual
tokens, `WHOLE` the others; `FED_ONCE` are those in which no token passes the model twice.
"""

from __future__ import annotations

import importlib
import pkgutil

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.protocols.base import Lengths, Protocol

__all__ = ["CUTTING", "DEFAULT", "FED_ONCE", "NAMES", "WHOLE", "Lengths", "Protocol", "protocol"]

DEFAULT = "paper"


def _found() -> dict[str, Protocol]:
    files = [importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)]
    kinds = [
        kind
        for file in files
        for kind in vars(file).values()
        if isinstance(kind, type) and issubclass(kind, Protocol) and kind.__module__ == file.__name__
    ]
    made = [kind() for kind in kinds if kind is not Protocol]
    return {one.name: one for one in sorted(made, key=lambda one: (one.diagnostic, one.name))}


_PROTOCOLS = _found()
NAMES = tuple(_PROTOCOLS)
CUTTING = tuple(name for name, one in _PROTOCOLS.items() if one.cuts)
WHOLE = tuple(name for name in NAMES if name not in CUTTING)
FED_ONCE = tuple(name for name, one in _PROTOCOLS.items() if one.feeds_once)


def protocol(name: str) -> Protocol:
    """The protocol of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _PROTOCOLS:
        raise ConfigError(f"protocol={name!r} is unknown; {nearest(str(name), NAMES)}")
    return _PROTOCOLS[name]
