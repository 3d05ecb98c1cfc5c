"""The checksum of a model folder."""

from __future__ import annotations

import os

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.models import fingerprint as module
from mmkv_bench.models.fingerprint import cache_dir, folder_fingerprint
from tests.planning.setting import model_folder


@pytest.fixture
def folder(tmp_path):
    return model_folder(tmp_path / "model")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_equal_folders_have_equal_fingerprints_wherever_they_lie(tmp_path, cache):
    first, second = model_folder(tmp_path / "a"), model_folder(tmp_path / "b" / "c")
    assert folder_fingerprint(first, cache) == folder_fingerprint(second, cache)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors"])
def test_a_changed_file_changes_the_fingerprint(folder, cache, name):
    before = folder_fingerprint(folder, cache)
    file = folder / name
    file.write_bytes(file.read_bytes()[:-1] + b" }"[: 1 + name.endswith("json")])
    assert folder_fingerprint(folder, cache) != before


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "model-00002.safetensors"])
def test_an_added_file_changes_the_fingerprint(folder, cache, name):
    before = folder_fingerprint(folder, cache)
    (folder / name).write_text("{}")
    assert folder_fingerprint(folder, cache) != before


def test_a_model_card_does_not_change_the_fingerprint(folder, cache):
    before = folder_fingerprint(folder, cache)
    (folder / "README.md").write_text("another card")
    assert folder_fingerprint(folder, cache) == before


def test_unchanged_files_are_not_read_again(folder, cache, monkeypatch):
    before = folder_fingerprint(folder, cache)
    monkeypatch.setattr(module, "_sha256", lambda file: pytest.fail(f"{file} was read again"))
    assert folder_fingerprint(folder, cache) == before


def test_a_file_of_equal_size_and_another_time_is_read_again(folder, cache):
    before = folder_fingerprint(folder, cache)
    file = folder / "config.json"
    stat = file.stat()
    file.write_text(file.read_text().replace("llama", "llamb"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert folder_fingerprint(folder, cache) != before


@pytest.mark.parametrize("content", ["", "no json", "[]", "3"])
def test_a_damaged_cache_is_ignored(folder, cache, content):
    before = folder_fingerprint(folder, cache)
    (cache / "fingerprints.json").write_text(content)
    assert folder_fingerprint(folder, cache) == before


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(folder, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert folder_fingerprint(folder, blocked / "cache") == folder_fingerprint(folder, tmp_path / "cache")


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MMKV_BENCH_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "mmkv_bench"
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


def test_pickled_weights_are_refused(folder, cache):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="only safetensors are loaded"):
        folder_fingerprint(folder, cache)


def test_a_folder_without_config_is_refused(folder, cache):
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no config.json"):
        folder_fingerprint(folder, cache)
