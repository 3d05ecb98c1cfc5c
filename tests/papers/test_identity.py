"""Promise: no row that was made with anything else than an address says is evidence for what is printed there."""

from __future__ import annotations

from mmkv_bench.papers.roles import CONTEXT, FREE, IDENTITY, ROLES, columns
from mmkv_bench.store.schema import COLUMNS


def test_every_column_has_one_role_and_what_a_cells_hash_covers_is_never_free():
    assert {*ROLES} == {*COLUMNS}
    for table, own in COLUMNS.items():
        declared = [name for role in (IDENTITY, CONTEXT, FREE) for name in columns(table, role)]
        assert sorted(declared) == sorted(column.name for column in own), table
    hashed = {column.name for column in COLUMNS["cells"] if column.identity}
    assert hashed - {*columns("cells", IDENTITY)} == {"torch", "transformers"}, (
        "newer libraries are another run of the same"
    )
    assert not hashed & {*columns("cells", FREE)}
