"""The checksum of a model folder."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from mmkv_bench import file_state
from mmkv_bench import file_state as module
from mmkv_bench.errors import ConfigError
from mmkv_bench.file_state import cache_dir
from mmkv_bench.models.files import folder_fingerprint, model_files
from tests.plan.setting import model_folder


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


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the files that are read for a checksum; files count as settled the moment they are written."""
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)
    monkeypatch.setattr(module.Checksums, "here", {})
    found, plain = [], module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda file: found.append(file.name) or plain(file))
    return found


def test_unchanged_files_are_read_once_here_and_in_later_processes(folder, cache, reads):
    before = folder_fingerprint(folder, cache)
    assert sorted(reads) == sorted(file.name for file in model_files(folder))
    assert folder_fingerprint(folder, cache / "not written yet") == before
    module.Checksums.here.clear()  # another process
    assert folder_fingerprint(folder, cache) == before
    assert len(reads) == len(set(reads))


@pytest.mark.parametrize("how", ["renamed over", "written in place", "times alone"])
def test_equal_size_and_times_hide_no_replaced_file_and_only_it_is_read_again(folder, cache, reads, how):
    before = folder_fingerprint(folder, cache)
    file, stat = folder / "config.json", (folder / "config.json").stat()
    reads.clear()
    content = file.read_text() if how == "times alone" else file.read_text().replace("llama", "llamb")
    target = folder / "config.new" if how == "renamed over" else file
    target.write_text(content)
    os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    while target.stat().st_ctime_ns == stat.st_ctime_ns:  # the clock of times of change is coarse
        os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    target.rename(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert (folder_fingerprint(folder, cache) != before) == (how != "times alone")
    assert reads == ["config.json"]


def test_a_file_that_changed_just_now_is_not_remembered(folder, cache, reads, monkeypatch):
    monkeypatch.setattr(file_state, "SETTLED_NS", 10**12)
    for _ in range(2):
        folder_fingerprint(folder, cache)
    assert len(reads) == 2 * len(set(reads)) and not (cache / "checksums.json").exists()


def test_states_that_show_no_time_of_change_are_remembered_in_their_process_alone(folder, monkeypatch):
    file = folder / "config.json"
    old = file_state.state_of(file)._replace(changed=1, modified=1)
    assert file_state.outlives_the_process(file, old)
    packed = SimpleNamespace(f_flag=os.ST_RDONLY)  # a squashfs image
    monkeypatch.setattr(
        file_state, "os", SimpleNamespace(name="posix", ST_RDONLY=os.ST_RDONLY, statvfs=lambda _: packed)
    )
    assert not file_state.outlives_the_process(file, old)
    assert file_state.outlives_the_process(file, old._replace(changed=2))
    monkeypatch.setattr(file_state, "os", SimpleNamespace(name="nt"))
    assert not file_state.outlives_the_process(file, old._replace(changed=2))


def test_a_file_that_is_written_while_it_is_read_is_refused(folder, cache, monkeypatch):
    plain = module.file_sha256
    monkeypatch.setattr(module, "file_sha256", lambda file: (plain(file), file.touch())[0])
    with pytest.raises(ConfigError, match="changed while its checksum was computed"):
        folder_fingerprint(folder, cache)


@pytest.mark.parametrize("content", ["", "no json", "[]", "3", '{"config.json": 1}'])
def test_a_damaged_cache_is_ignored(folder, cache, content):
    before = folder_fingerprint(folder, cache)
    cache.mkdir(exist_ok=True)
    (cache / "checksums.json").write_text(content.replace("config.json", str((folder / "config.json").resolve())))
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
    with pytest.raises(ConfigError, match="pickled weights are never loaded"):
        folder_fingerprint(folder, cache)


def test_a_folder_without_config_is_refused(folder, cache):
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no config.json"):
        folder_fingerprint(folder, cache)


def test_a_folder_of_several_checkpoints_is_refused_with_one_of_them(folder, tmp_path, cache):
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(folder, tmp_path / "several" / name)
    with pytest.raises(ConfigError, match=r"but 2 checkpoints; give one of these folders, such as .*checkpoint-1$"):
        folder_fingerprint(tmp_path / "several", cache)
    whole = next(folder.glob("*.safetensors")).rename(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": whole.name}}))
    folder_fingerprint(folder, cache)
    shutil.copy(whole, folder / "model-00001-of-00001.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ConfigError, match="two checkpoints, model.safetensors and the shards"):
        folder_fingerprint(folder, cache)
