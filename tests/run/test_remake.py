"""Promise: what a stored answer kept can be had again from the store alone, and a digest proves it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmkv_bench.diagnostics.remade_answers import remake
from mmkv_bench.errors import ConfigError
from mmkv_bench.generation.result import digest
from mmkv_bench.store.store import Store
from tests.run.setting import cell_of, done, responses

pytestmark = pytest.mark.full
SAMPLE = "mi_lookup-small-test-000000"


def test_the_indices_made_again_are_those_of_the_stored_digests(tmp_path):
    done(tmp_path, "dataset=pages", "method=[snapkv,adakv]", "budget=24", "limit=4", "seed=0")
    rows, cells = responses(tmp_path), {cell for cell, _ in responses(tmp_path)}
    found = remake(tmp_path, cells, SAMPLE)
    assert set(found) == cells and len(cells) == 3
    for cell, one in found.items():
        row = rows[cell, SAMPLE]
        assert one.same and one.proven and not one.differing
        assert digest([torch.from_numpy(layer) for layer in one.kept]) == row["kept_digest"]
        assert [(layer >= 0).sum(1).tolist() for layer in one.kept] == row["kept"]
        assert one.prompt.tokens == row["prompt_tokens"] and len(one.prompt.visual) == row["visual_tokens"]
        assert one.prompt.places.shape == (len(one.prompt.visual), 5) and set(one.prompt.places[:, 0]) == {0, 1, 2, 3}
    full = found[cell_of(tmp_path, "full")]
    assert all((layer == np.arange(full.prompt.tokens)).all() for layer in full.kept)

    changed = rows[cell_of(tmp_path, "snapkv"), SAMPLE] | {"kept_digest": "0" * 16}
    stamped = ("schema_version", "worker", "committed_at")
    with Store(tmp_path).writer("forger") as writer:
        writer.commit([{name: value for name, value in changed.items() if name not in stamped}])
    other = remake(tmp_path, [changed["cell"]], SAMPLE)[changed["cell"]]
    assert not other.same and not other.proven and other.differing == ["kept_digest"] and other.kept is not None
    with pytest.raises(ConfigError, match="has answered lookup-small-test-000009"):
        remake(tmp_path, cells, "lookup-small-test-000009")
