#!/usr/bin/env python3
"""Refuse YAML files that cannot be read, and mappings with a duplicate key (the later value would win silently)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import yaml


def faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each fault of the file. Tags (`!function`) are not resolved."""
    try:
        documents = list(yaml.compose_all(path.read_text(encoding="utf-8"), yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        yield f"{path} is not valid YAML: {' '.join(str(error).split())}"
        return
    for document in documents:
        yield from (f"{path}, line {line}: {key!r} occurs a second time" for key, line in _twice(document))


def _twice(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    yield key.value, key.start_mark.line + 1
                seen.add(key.value)
            yield from _twice(value)


def main() -> int:
    found = [fault for name in sys.argv[1:] for fault in faults(Path(name))]
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
