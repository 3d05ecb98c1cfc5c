"""Answers to samples that somebody asked for by their ids: they are no draw of a dataset, and no table takes them for one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from mmkv_bench.store.store import Store

COLUMN = "chosen"


def apart(store: Store, answers: pa.Table) -> np.ndarray | None:
    """bool [rows]: answers to chosen samples that lie behind all that their cell was asked by a limit, which would have them
    anyway; None where there are none.

    Args:
        answers: of `Store.responses`, with `cell` and `chosen`.
    """
    import pyarrow.compute as pc

    asked = pc.fill_null(answers[COLUMN], False).to_numpy()
    if not asked.any():
        return None
    cells = answers["cell"].filter(answers[COLUMN]).unique().to_pylist()
    own = np.flatnonzero(pc.is_in(answers["cell"].cast("string"), value_set=_texts(cells)).to_numpy())
    again = store.responses(cells, ("cell", "sample_id", "doc_id"))
    if again.num_rows != len(
        own
    ):  # somebody is writing: what was read says that they were asked for, not where they lie
        return asked
    place, chosen = again["doc_id"].to_numpy(), asked[own]
    of_cell = pc.index_in(again["cell"], value_set=_texts(cells)).to_numpy()
    reach = np.full(len(cells), -1, np.int64)
    np.maximum.at(reach, of_cell[~chosen], place[~chosen])
    found = np.zeros(len(asked), bool)
    found[own] = chosen & (place > reach[of_cell])
    return found if found.any() else None


def _texts(names: list[str]) -> pa.Array:
    import pyarrow as pa

    return pa.array(names, pa.string())
