"""Rows of the table `prompts`: what samples ask, for people who look at answers. No number is made of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from mmkv_bench.store.parts import keys, numbers_of

TABLE = "prompts"
_ONE = ("prompt_hash", "sample_id", "dataset", "model_fingerprint")


def newest(rows: pa.Table) -> pa.Table:
    """One row per prompt, sample and model, the one committed last: a sample that was asked again has several."""
    if not rows.num_rows:
        return rows
    key = keys(rows, _ONE)
    order = np.lexsort((numbers_of(rows["committed_at"].cast(pa.int64())), key))
    last = np.append(key[order][1:] != key[order][:-1], True)
    return rows.take(order[last])
