"""A reader's own words in tables: other names for their lines, and a caption."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.tables.table import GridCell, Table


def renamed(tables: Sequence[Table], names: Sequence[str]) -> list[Table]:
    """The tables with other names for lines, in cells and notes; records keep the ids.

    Args:
        names: `line=name`, the line as it is printed or without what stands in parentheses behind it, which then stays.

    Raises:
        ConfigError: no line is called so, or another line has the name.
    """
    printed = {row[0].text for table in tables for grid in table.grids for row in grid.cells if row}
    lines = printed | {text.partition(" (")[0] for text in printed}
    new: dict[str, str] = {}
    for text in names:
        splits = [(text[: at.start()], text[at.end() :]) for at in re.finditer("=", text)]
        line, name = next((split for split in reversed(splits) if split[0] in lines), ("", ""))
        if not line:
            asked, equals, _ = text.partition("=")
            advice = nearest(asked, lines) if equals else "write --name <line>=<name>"
            raise ConfigError(f"--name {text}: no table has such a line; {advice}")
        if not name or name in {*printed, *new.values()} - {line}:
            raise ConfigError(
                f"--name {text}: {'the name is empty' if not name else f'{name} is another line'}; choose another name"
            )
        new[line] = name
    return [_renamed(table, new) for table in tables] if new else list(tables)


def captioned(tables: Sequence[Table], caption: str | None) -> list[Table]:
    """The tables, with a caption in place of title and caption; ConfigError where it would stand at several tables."""
    if caption is None:
        return list(tables)
    if len(tables) != 1:
        raise ConfigError(
            f"--caption is of one table and there are {len(tables)}; choose one with --dataset, --metric or --protocol, or "
            "--join them"
        )
    return [replace(tables[0], title=caption, caption="", short="")]


def _renamed(table: Table, new: Mapping[str, str]) -> Table:
    any_line = "|".join(map(re.escape, sorted(new, key=len, reverse=True)))
    # In a sentence a name is followed by what no further word of a phrase ("the full cache") would be.
    named = re.compile(rf"(?<![\w-])({any_line})(?=$|[:;,.)]| \(| at | and | by | on )")

    def cell(one: GridCell) -> GridCell:
        line = one.text if one.text in new else one.text.partition(" (")[0]
        return replace(one, text=new[line] + one.text[len(line) :]) if line in new else one

    grids = [replace(grid, rows=[[cell(one) for one in row] for row in grid.cells]) for grid in table.grids]
    notes = [replace(note, text=named.sub(lambda found: new[found[1]], note.text)) for note in table.notes]
    return replace(table, grids=grids, notes=notes)
