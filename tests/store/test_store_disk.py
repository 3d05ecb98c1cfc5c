"""Disks that are full, and result folders that cannot be one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from store_examples import ENVIRONMENT, bind_to_permissions, response

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.files import Staged, new_locked, remove_stale
from mmkv_bench.store.store import Store
from tests.each import each


@pytest.mark.slow
def test_a_full_disk_is_an_error_with_a_remedy_and_leaves_nothing_half_written(tmp_path):
    child = Path(__file__).parent / "full_disk_child.py"
    done = subprocess.run([sys.executable, str(child), str(tmp_path)], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.stdout == "all as promised\n", done.stderr


def test_a_folder_that_can_hold_rows_passes_and_nothing_is_made(tmp_path):
    Store(tmp_path / "new" / "deep").check_writable()
    assert list(tmp_path.iterdir()) == []
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([response(0)])
    before = sorted(tmp_path.rglob("*"))
    store.check_writable()
    assert sorted(tmp_path.rglob("*")) == before


@each("inside", ["", "below", "deep/below"])
def test_a_file_where_the_folder_should_be_is_refused_before_any_work(tmp_path, inside):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(ConfigError, match="file is not a folder. Choose another"):
        Store(tmp_path / "file" / inside).check_writable()
    assert (tmp_path / "file").read_text() == "precious"


def test_a_dangling_link_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="link is not a folder"):
        Store(tmp_path / "link").check_writable()


def test_a_folder_without_permission_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    store = Store(tmp_path / "locked" / "results")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bind_to_permissions()
            store.check_writable()
        except ConfigError as problem:
            os.write(writing, str(problem).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    assert "cannot write in" in said
    assert "Permission denied" in said
    assert "Choose another result folder" in said


def test_a_disk_without_room_for_a_file_asks_for_room_and_not_for_rights(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(ConfigError, match=r"cannot write in .* \(No space left on device\)\. Free some space"):
        Store(tmp_path).check_writable()


def test_too_little_space_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ConfigError, match=r"MiB are free, but at least \d{7,} MiB are needed"):
        Store(tmp_path).check_writable(need_bytes=1 << 60)


@pytest.mark.full
def test_a_store_without_write_permission_can_still_be_read(tmp_path):
    store = Store(tmp_path / "store")
    with store.writer("w", publish_every=1) as writer:
        writer.commit([response(0)])
        writer.commit([response(1)])
    code = (
        "import sys; from mmkv_bench.store.store import Store; from store_examples import bind_to_permissions, journal_damage\n"
        "def read(): store = Store(sys.argv[1]); return store.responses().num_rows, journal_damage(store)\n"
        "read()  # what it imports may lie where root alone can read\n"
        "bind_to_permissions()\n"
        "print(*read())"
    )
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.chmod(path, 0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-c", code, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parent)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chmod(path, 0o755)  # so that pytest can clear up
    assert done.stdout == "2 {}\n", done.stderr


def test_a_leftover_is_removed_when_its_writer_is_dead_and_only_then(tmp_path):
    dead, alive = tmp_path / ".a.tmp", tmp_path / ".b.tmp"
    dead.write_bytes(b"half")
    file = new_locked(alive)
    try:
        remove_stale(tmp_path)
        assert not dead.exists() and alive.exists()
        staged = Staged(tmp_path / "c", lambda stream: (stream.write(b"whole"), remove_stale(tmp_path)))
        remove_stale(tmp_path)
        staged.place()
        assert (tmp_path / "c").read_bytes() == b"whole"
    finally:
        os.close(file)
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@each("how", ("removed", "moved", "replaced", "removed between parts"))
def test_a_result_folder_that_is_taken_away_stops_its_writer_with_what_is_lost(tmp_path, how):
    root = tmp_path / "rows"
    writer = Store(root).writer("w", publish_every=3)
    for i in range(3 if how == "removed between parts" else 5):
        writer.commit([response(i)])
    root.rename(tmp_path / "away") if how == "moved" else shutil.rmtree(root)
    if how == "replaced":
        (root / "journal").mkdir(parents=True)
    lost = 1 if how == "removed between parts" else 3
    with pytest.raises(StoreError, match=rf"removed, moved or replaced.*Lost: {lost} samples.*run the same command"):
        writer.commit([response(8)])
    assert not list(root.rglob("*.parquet")) and not list(root.rglob("*.jsonl"))
    writer.publish()
    with Store(root).writer("w") as again:  # the same command again
        again.commit([response(8)])
    assert Store(root).responses().num_rows == 1


def test_a_run_that_ends_after_its_folder_was_removed_does_not_say_that_rows_stay(tmp_path):
    root = tmp_path / "rows"
    with pytest.raises(StoreError, match="Lost: 2 samples"), Store(root).writer("w") as writer:
        for i in range(2):
            writer.commit([response(i)])
        shutil.rmtree(root)
