"""The pages as local datasets: the same bytes everywhere, checked on every load, safe to make side by side."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from mmkv_bench.datasets import page_data
from mmkv_bench.datasets.drawn_page_tasks import DEFAULT_COUNT, PAGE_TASKS, SIZES, lmms_eval_name
from mmkv_bench.errors import DataError
from mmkv_bench.evaluation.fingerprints import fingerprint
from mmkv_bench.tiny.pages import make_sample
from tests.each import each
from tests.evaluation.conftest import pages
from tests.run.setting import fork, joined

CHUNK = page_data.CHUNK


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A cache with the first chunk of one dataset."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMKV_BENCH_CACHE", str(folder))
        page_data.load("pages_walk_small", "test", 1)
    return folder


@pytest.fixture
def one_chunk(drawn, fresh_cache):
    """A copy of that cache, which reads as it was written."""
    shutil.copytree(drawn, fresh_cache)
    assert len(page_data.load("pages_walk_small", "test", 1)) == 1 and files(fresh_cache) == files(drawn)
    return fresh_cache


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.full
def test_two_generations_are_byte_identical(tmp_path, monkeypatch):
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / name))
        page_data.load("pages_small", "test", CHUNK)
        made.append(files(tmp_path / name))
    assert made[0] == made[1]
    assert len(made[0]) == 2


@pytest.mark.slow
def test_rows_are_the_samples_of_the_generator(fresh_cache):
    rows = page_data.load("pages_multi_image_small", "dev", 4)
    for position, row in enumerate(rows):
        sample = make_sample(("mi_lookup", "mi_walk3")[position % 2], "small", "dev", position // 2)
        assert [row[name] for name in ("sample_id", "cluster", "kind", "question", "answer")] == [
            sample.sample_id,
            sample.cluster,
            sample.task,
            sample.question,
            sample.answer,
        ]
        assert [image.tobytes() for image in row["images"]] == [image.tobytes() for image in sample.images]


@pytest.mark.full
def test_only_as_many_chunks_are_drawn_as_the_limit_asks_and_a_larger_limit_keeps_earlier_samples(fresh_cache):
    few = page_data.load("pages_walk_small", "test", 3)
    before = files(fresh_cache)
    assert (len(few), len(before)) == (3, 2)
    more = page_data.load("pages_walk_small", "test", CHUNK + 1)
    after = files(fresh_cache)
    assert (len(more), len(after)) == (CHUNK + 1, 4)
    assert before.items() <= after.items()
    assert more.remove_columns("images").to_list()[:3] == few.remove_columns("images").to_list()


@pytest.mark.slow
def test_a_flipped_byte_is_detected(one_chunk):
    (table,) = one_chunk.rglob("*.arrow")
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    with pytest.raises(DataError, match=f"corrupt.*delete {table.parent}"):
        page_data.load("pages_walk_small", "test", 1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", "{", "[]", "{}"])
def test_a_damaged_manifest_is_detected(one_chunk, damage):
    (manifest,) = one_chunk.rglob("manifest.json")
    manifest.write_text(damage)
    with pytest.raises(DataError, match=f"delete {manifest.parent}"):
        page_data.load("pages_walk_small", "test", 1)


def test_a_table_that_went_missing_is_detected(one_chunk):
    (table,) = one_chunk.rglob("*.arrow")
    table.unlink()
    with pytest.raises(DataError, match=f"delete {table.parent}"):
        page_data.load("pages_walk_small", "test", 1)


@pytest.mark.full
def test_processes_may_make_the_same_pages_side_by_side(fresh_cache):
    children = [fork(lambda: len(page_data.load("pages_walk_small", "test", 30))) for _ in range(3)]
    assert [joined(*child) for child in children] == [30] * 3
    names = sorted(path.name for path in next(fresh_cache.rglob("pages_walk_small-test")).iterdir())
    assert names == ["00000", "00001"]  # and nothing unfinished


def test_an_interrupted_chunk_leaves_nothing_behind(fresh_cache, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        page_data.load("pages_walk_small", "test", 1)
    assert files(fresh_cache) == {}


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="MMKV_BENCH_CACHE"):
        page_data.load("pages_walk_small", "test", 1)


@pytest.mark.slow
def test_fingerprints_tell_datasets_apart_and_no_limit_changes_them(fresh_cache):
    specs = [pages("pages_walk"), pages("pages_walk", split="dev"), pages("pages_lookup"), pages("pages_walk", "large")]
    first = [fingerprint(spec) for spec in specs]
    assert len(set(first)) == len(specs)
    page_data.load("pages_walk_small", "test", CHUNK + 1)
    assert [fingerprint(spec) for spec in specs] == first


def test_every_test_page_is_frozen_and_the_dev_pages_that_fingerprints_are_made_of():
    names = [lmms_eval_name(task, size) for task in PAGE_TASKS for size in SIZES]
    wanted = dict.fromkeys(names, DEFAULT_COUNT // CHUNK) | {f"{name}_dev": 1 for name in names}
    assert {name: len(digests) for name, digests in page_data.frozen_digests().items()} == wanted


@pytest.mark.full
@each("task", PAGE_TASKS)
def test_drawn_test_pages_are_the_frozen_ones(task):
    name = lmms_eval_name(task, "small")
    rows = [page_data.to_row(sample) for sample in page_data.chunk_samples(name, "test", 0)]
    assert page_data.content_digest(rows) == page_data.frozen_digests()[name][0]


@pytest.mark.full
def test_test_pages_that_are_not_the_frozen_ones_are_refused(fresh_cache, monkeypatch):
    frozen = json.loads(page_data.FROZEN.read_text())
    frozen["pages_walk_small"][0] = "0" * 64
    monkeypatch.setattr(page_data, "frozen_digests", lambda: frozen)
    page_data.load("pages_walk_small", "dev", 1)
    with pytest.raises(DataError, match="differ from the frozen pages"):
        page_data.load("pages_walk_small", "test", 1)
