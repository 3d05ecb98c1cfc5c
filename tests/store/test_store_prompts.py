"""What samples ask and which entries stay: durable with the answers, read back as written, not published."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_examples import older_store, response

from mmkv_bench.errors import StoreError
from mmkv_bench.store.compact import pack
from mmkv_bench.store.publish import PUBLISHED, publish
from mmkv_bench.store.response import digest_of_kept, pack_kept, unpack_kept
from mmkv_bench.store.store import Store

PROMPT = {
    "prompt_hash": "0" * 16,
    "model_fingerprint": "m" * 16,
    "dataset": "pages",
    "sample_id": "s0000",
    "doc_id": 0,
    "question": "<image>\nV?",
    "reference": "814",
    "media": 1,
    "images": ["/data/a.png"],
    "visual": [4.0, 0.0, 0.0, 0.5, 0.25, 1.0],
}


def asked(store: Store) -> list[dict]:
    return [{name: row[name] for name in PROMPT} for row in store.prompts().to_pylist()]


def test_a_prompt_is_there_from_the_commit_on_and_the_newest_counts(tmp_path):
    store = Store(tmp_path / "rows")
    assert asked(store) == []
    with store.writer("w") as writer:
        writer.commit([response(0)], PROMPT)
        assert asked(Store(store.root)) == [PROMPT]  # from the journal
        writer.commit([response(1)])
        writer.publish()
        assert not store.journals() and asked(store) == [PROMPT]
        writer.commit([response(0, "c1")], PROMPT | {"reference": None, "images": None, "visual": None})
        other = PROMPT | {"model_fingerprint": "n" * 16}
        writer.commit([response(0, "c2")], other)
    assert asked(store) == [PROMPT | {"reference": None, "images": None, "visual": None}, other]
    with store.writer("w") as writer, pytest.raises(StoreError, match="prompts: column 'question' is missing"):
        writer.commit([response(2)], {key: value for key, value in PROMPT.items() if key != "question"})
    assert store.responses().num_rows == 4
    pack(store)
    assert len(asked(store)) == 2 and "prompts" not in PUBLISHED
    publish(store, tmp_path / "published")
    assert not [path for path in (tmp_path / "published").iterdir() if path.name.startswith("prompts")]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_packed_choices_come_back_and_have_the_digest_of_a_plain_loop(data):
    tokens = data.draw(st.integers(1, 40))
    shape = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    places = st.sets(st.integers(0, tokens - 1)).map(sorted)
    kept = [[np.array(data.draw(places), dtype=np.int32) for _ in range(shape[1])] for _ in range(shape[0])]
    bits = unpack_kept(pack_kept(kept, tokens))
    assert bits.shape == (*shape, tokens)
    assert [[np.flatnonzero(head).tolist() for head in layer] for layer in bits] == [
        [head.tolist() for head in layer] for layer in kept
    ]
    plain = hashlib.sha256(b"".join(head.tobytes() + b"|" for layer in kept for head in layer))
    assert digest_of_kept(bits) == plain.hexdigest()[:16]


def test_a_text_that_nobody_packed_is_refused():
    good = pack_kept([[np.array([1, 2])]], 9)
    for text in ("", "1x1x9:", good.replace("1x1x9", "1x2x9"), good.replace("1x1x9", "1x1x90"), good[:-6]):
        with pytest.raises(StoreError, match="does not decode to kept entries"):
            unpack_kept(text)


def test_older_files_read_coded_have_nulls_where_a_text_column_is_newer(tmp_path):
    store = Store(older_store(tmp_path / "rows"))
    rows = store.responses(None, ["cell", "answer", "kept_indices"], coded=True)
    assert rows.num_rows and rows["kept_indices"].null_count == rows.num_rows
    assert rows["answer"].null_count < rows.num_rows
