"""The journal: a crash can cost the line being written and nothing else."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
from store_examples import journal_damage, response

from mmkv_bench.errors import StoreError
from mmkv_bench.store import journal
from mmkv_bench.store.files import checksum
from mmkv_bench.store.journal import Journal
from mmkv_bench.store.store import Store
from tests.each import each


def written(folder: Path, records: list[dict]) -> Path:
    """A journal whose writer is gone."""
    file = Journal(folder, "w")
    for record in records:
        file.append(record)
    file.close()
    return file.path


def test_a_line_is_its_checksum_and_its_text(tmp_path):
    path = written(tmp_path, [{"b": "naïve\n\u2028", "a": None}])
    line = path.read_bytes()
    assert line == checksum(line[17:-1]).encode() + b" " + '{"a":null,"b":"naïve\\n\u2028"}'.encode() + b"\n"


def test_a_journal_cut_anywhere_gives_every_whole_line(tmp_path):
    records = [{"sample": i, "answer": "ä" * i} for i in range(4)]
    path = written(tmp_path, records)
    raw = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == 10]
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut])
        whole = sum(end <= cut for end in ends)
        content = journal.read(path)
        assert content.records == records[:whole]
        assert content.torn == cut - ([0, *ends][whole])
        assert content.data == raw[: cut - content.torn]


@pytest.mark.parametrize("tail", [b"\0" * 300, b"half a line", b"0123456789abcdef {}\n", b"\n"])
def test_a_corrupt_last_line_is_dropped_counted_and_warned_about(tmp_path, caplog, tail):
    store = Store(tmp_path)
    writer = store.writer("w")
    writer.commit([response(0)])
    path = next((tmp_path / "journal").glob("*.jsonl"))
    with path.open("ab") as stream:
        stream.write(tail)
    assert store.responses(columns=["sample_id"]).num_rows == 1
    assert journal_damage(store) == {}  # its writer lives: this would be a line on its way
    assert not caplog.records
    del writer  # drops the lock, as the end of a process does; no publish
    os.close(_descriptor_of(path))
    with caplog.at_level(logging.WARNING):
        assert store.responses(columns=["sample_id"])["sample_id"].to_pylist() == ["s0000"]
    assert f"torn last line of {len(tail)} bytes" in caplog.text
    assert journal_damage(store) == {path.name: len(tail)}
    assert store.recover() == 1
    assert journal_damage(store) == {}
    assert store.responses().num_rows == 1


def _descriptor_of(path: Path) -> int:
    """This process's descriptor of an open file."""
    for entry in Path("/proc/self/fd").iterdir():
        if os.path.realpath(entry) == os.path.realpath(path):
            return int(entry.name)
    raise AssertionError(f"{path} is not open")


@pytest.mark.slow
@each("damage", ["flip", "zeros", "blank"])
def test_corruption_in_the_middle_is_an_error_naming_file_and_line(tmp_path, damage):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        for sample in range(4):
            writer.commit([response(sample)])
        path = next((tmp_path / "journal").glob("*.jsonl"))
        lines = path.read_bytes().splitlines(keepends=True)
        old = lines[2]
        lines[2] = {"flip": old[:40] + bytes([old[40] ^ 1]) + old[41:], "zeros": b"\0" * 99 + b"\n", "blank": b"\n"}[
            damage
        ]
        path.write_bytes(b"".join(lines))
        for use in (store.responses, lambda: store.done(["c0"]), writer.publish):
            with pytest.raises(StoreError, match=f"{path.name}, line 3: the checksum"):
                use()
        path.write_bytes(b"".join([*lines[:2], old, *lines[3:]]))
    assert store.responses().num_rows == 4


def test_a_living_writers_journal_is_read_but_never_taken_over(tmp_path):
    store = Store(tmp_path)
    with store.writer("w") as writer:
        writer.commit([response(0)])
        path = next((tmp_path / "journal").glob("*.jsonl"))
        assert journal.in_use(path)
        assert journal.claim(path) is None
        other = Store(tmp_path)  # a lock belongs to an open file, so this store is as foreign as another process's
        assert other.recover() == 0
        assert other.responses().num_rows == 1
        assert path.exists()
        writer.commit([response(1)])
    assert store.responses().num_rows == 2


def test_only_one_of_two_takes_an_abandoned_journal(tmp_path):
    path = written(tmp_path, [{"a": 1}])
    first = journal.claim(path)
    assert first is not None
    assert journal.claim(path) is None
    path.unlink()  # as the first does after publishing
    os.close(first)
    assert journal.claim(path) is None


def test_a_journal_that_is_published_while_it_is_being_claimed_is_not_claimed(tmp_path):
    path = written(tmp_path, [{"a": 1}])
    child = os.fork()
    if child == 0:  # audit hooks stay for good, so in a process of its own
        try:
            sys.addaudithook(lambda event, _: path.unlink() if event == "fcntl.flock" else None)
            os._exit(7 if journal.claim(path) is None else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not path.exists()


def test_a_forked_process_may_not_write_with_its_parents_writer(tmp_path):
    with Store(tmp_path).writer("w") as writer:
        writer.commit([response(0)])
        child = os.fork()
        if child == 0:
            try:
                writer.commit([response(1)])
            except StoreError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
