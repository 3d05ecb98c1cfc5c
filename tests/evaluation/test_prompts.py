"""Promise: a prompt is made again exactly where something that it was made of may have changed."""

from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmkv_bench import file_state
from mmkv_bench.datasets.messages import Conversation
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.evaluation import fingerprints, generating
from mmkv_bench.evaluation.documents import paths_without_bytes
from mmkv_bench.evaluation.fingerprints import rows_hold_media
from mmkv_bench.evaluation.generating import prompt_hashes
from mmkv_bench.evaluation.task_code import OpenedFiles, opened
from mmkv_bench.file_state import State, state_of
from tests.evaluation.conftest import pages


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    """Files count as settled the moment they are written."""
    monkeypatch.setattr(file_state, "SETTLED_NS", -1)


def heard(*files) -> OpenedFiles:
    found = OpenedFiles()
    found.files = {str(file): state_of(file) if file.exists() else None for file in files}
    return found


def test_files_that_are_read_are_heard_and_nothing_else(tmp_path, monkeypatch):
    read, code, gone = tmp_path / "read", tmp_path / "code.py", tmp_path / "gone"
    for file in (read, code):
        file.write_text("content")
    state = state_of(read)
    with opened() as found, opened() as inner:
        read.read_text()
        code.read_text()
        (tmp_path / "written").write_text("more")
        os.close(os.open(read, os.O_RDONLY))
        with pytest.raises(FileNotFoundError):
            gone.read_text()
        with open("/proc/self/status") as stream:
            stream.read()
    read.write_text("later")
    assert found.files == inner.files == {str(read): state, str(gone): None} and found.traceable
    monkeypatch.chdir(tmp_path)
    with opened() as found:
        open("read").close()
    assert not found.traceable


def test_a_prompt_is_known_until_one_of_its_files_is_another_or_comes_to_be(tmp_path):
    files = [tmp_path / name for name in "abc"]
    for file in files[:2]:
        file.write_text(file.name)
    remembered = tmp_path / "cache" / "known.json.gz"
    memory = fingerprints.Memory(remembered, media=False)
    for doc_id, of in enumerate(([files[0]], [files[0], files[1]], [files[1], files[2]], [])):
        memory.note(doc_id, f"hash{doc_id}", Conversation([], [], []), heard(*of))
    memory.save()
    later = fingerprints.Memory(remembered, media=False)
    assert later.look(range(5)) == {4} and later.looked == {number: f"hash{number}" for number in range(4)}
    os.replace(files[1], tmp_path / "moved")
    files[1].write_text("b")
    os.utime(files[1], ns=(1, 1))
    assert later.look(range(4)) == {1, 2}
    files[2].write_text("there now")
    files[0].unlink()
    assert fingerprints.Memory(remembered, media=False).look(range(4)) == {0, 1, 2}


def test_a_prompt_of_which_not_all_files_are_known_is_not_remembered(tmp_path):
    file, picture = tmp_path / "a", Image.new("RGB", (2, 2))
    file.write_text("a")
    unheard, relative = heard(), heard(file)
    relative.traceable = False
    memory = fingerprints.Memory(tmp_path / "known.json.gz", media=False)
    notes = [(Conversation([], [picture], []), unheard), (Conversation([], [], [[picture]]), heard(file))]
    notes.append((Conversation([], [], [{"video": [picture], "start_time": 1.0}]), heard(file)))
    for doc_id, (prompt, found) in enumerate([*notes, (Conversation([], [picture], []), relative)]):
        memory.note(doc_id, "hash", prompt, found)
    memory.note(4, "", Conversation([], [], []), heard(file))
    assert memory.look(range(5)) == {0, 1, 2, 3, 4} == set(memory.looked)
    memory.note(5, "hash", Conversation([], [], [{"video": str(file), "start_time": 1.0}]), heard(file))
    assert memory.look([5]) == set()


def test_what_other_processes_remember_stays_and_a_damaged_file_is_ignored(tmp_path):
    file = tmp_path / "known.json.gz"
    memories = [fingerprints.Memory(file, media=True) for _ in range(2)]
    for doc_id, memory in enumerate(memories):
        memory.note(doc_id, "hash", Conversation([], [], []), heard())
        memory.known[doc_id].files["/big"] = State(2**64 - 1, 2**64 - 2, -3, 10**19, 0)
        memory.save()
    assert fingerprints.Memory(file, media=True).known == memories[0].known | memories[1].known
    for damage in (file.read_bytes()[:-9], b""):
        file.write_bytes(damage)
        assert fingerprints.Memory(file, media=True).known == {}
    pq.write_table(pa.table({"doc_id": [1]}), file)
    assert fingerprints.Memory(file, media=True).known == {}


def test_pictures_by_path_and_pictures_in_rows_are_told_apart(tmp_path):
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    held, named, none = {"bytes": b"x", "path": "a"}, {"bytes": None, "path": "a"}, {"bytes": None, "path": None}
    for rows, expected in (([held, none], False), ([held, None], False), ([held, named], True)):
        assert bool(paths_without_bytes(pa.chunked_array([pa.array(rows, kind)]))) == expected
        lists = pa.chunked_array([pa.array([rows, [held], None], pa.list_(kind))])
        assert bool(paths_without_bytes(lists)) == expected
    assert rows_hold_media(pages())


def test_a_parquet_file_that_names_its_pictures_is_looked_at_and_one_that_holds_them_is_not(tmp_path, monkeypatch):
    picture = tmp_path / "picture.bmp"
    Image.new("RGB", (28, 28), (9, 0, 0)).save(picture)
    specs = {}
    for name, medium in (
        ("held", {"bytes": picture.read_bytes(), "path": None}),
        ("named", {"bytes": None, "path": str(picture)}),
    ):
        (tmp_path / name / "data").mkdir(parents=True)
        row = {"question": "q", "answers": ["a"], "questionId": "1", "image": medium}
        kind = pa.schema(
            {"question": pa.string(), "answers": pa.list_(pa.string()), "questionId": pa.string()}
            | {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()})}
        )
        pq.write_table(pa.Table.from_pylist([row], kind), tmp_path / name / "data" / "validation-0.parquet")
        columns = {"about": {"columns": ["question", "answers", "questionId", "image"]}}
        node = {"task": "docvqa_val", "dataset_path": str(tmp_path / name)} | columns
        specs[name] = spec_from_config("lmms_eval", node)
    assert {name: rows_hold_media(spec) for name, spec in specs.items()} == {"held": True, "named": False}
    made, plain = [], generating.prompt_hash
    monkeypatch.setattr(generating, "prompt_hash", lambda prompt: made.append(plain(prompt)) or made[-1])
    first = prompt_hashes(specs["named"], [0], None, anew=True)
    assert first == prompt_hashes(specs["named"], [0], None, anew=True) == prompt_hashes(specs["held"], [0], None)
    assert len(made) == 2
    fingerprints._MEMORIES.clear()  # another process
    assert prompt_hashes(specs["named"], [0], None, anew=True) == first and len(made) == 2
    Image.new("RGB", (28, 28), (10, 0, 0)).save(tmp_path / "new.bmp")
    os.replace(tmp_path / "new.bmp", picture)
    assert prompt_hashes(specs["named"], [0], None) == first  # this process has looked
    assert prompt_hashes(specs["named"], [0], None, anew=True) != first
