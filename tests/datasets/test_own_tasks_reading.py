"""What our own tasks read: released files as they are, wrong ones named in one sentence."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.datasets.tasks.conversations import reading as conversations
from mmkv_bench.datasets.tasks.dream1k.reading import read_videos
from mmkv_bench.datasets.tasks.favor_bench.reading import read_questions
from mmkv_bench.datasets.tasks.longbench.reading import read_task
from mmkv_bench.datasets.tasks.longbench.subtasks import SUBTASKS, subtask
from mmkv_bench.datasets.tasks.needle.haystack import Settings, hidden, read_grid
from mmkv_bench.errors import DataError
from tests.each import each
from tools.fixtures import conversations as shapes

QUESTION = {"question": "q?", "options": ["a", "b"], "correct_answer": "b", "task_type": "CM"}


def write(folder, name, content):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))


# FAVOR-Bench


def test_both_annotations_of_favor_bench_give_the_same_questions(tmp_path):
    write(
        tmp_path,
        "one/video_perspective.json",
        [{"video_name": "v.mp4", "questions": [QUESTION, QUESTION | {"task_type": "AS"}]}],
    )
    flat = [QUESTION | {"video_name": "v.mp4", "question_key": "v_1"}]
    flat += [QUESTION | {"video_name": "v.mp4", "question_key": "v_2", "task_type": "AS"}]
    write(tmp_path, "two/question_perspective.json", flat)
    first, second = (list(read_questions(tmp_path / name)["test"]) for name in ("one", "two"))
    assert first == second
    assert [row["sample_id"] for row in first] == ["v_1", "v_2"]
    assert {row["video"] for row in first} == {"videos/v.mp4"}


@each(
    ("content", "message"),
    [
        ("[{", "is no JSON"),
        ({}, "is no list of samples"),
        ([], "is no list of samples"),
        ([{"video_name": "v"}], "sample 0 of .* lacks questions"),
        ([{"video_name": "v", "questions": []}], "has no question"),
        ([{"video_name": "../v", "questions": [QUESTION]}], "no file below"),
        ([{"video_name": "v", "questions": [QUESTION | {"task_type": "XX"}]}], "task_type 'XX', none of AS, HAC"),
        ([{"video_name": "v", "questions": [QUESTION | {"correct_answer": "c"}]}], "none of its options"),
        ([{"video_name": "v", "questions": [{"question": "q?"}]}], "lacks options, correct_answer, task_type"),
    ],
)
def test_favor_bench_files_that_are_wrong(tmp_path, content, message):
    write(tmp_path, "video_perspective.json", content)
    with pytest.raises(DataError, match=message):
        read_questions(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="has no video_perspective.json nor question_perspective.json"):
        read_questions(tmp_path)
    with pytest.raises(DataError, match="has no json/metadata.json"):
        read_videos(tmp_path)
    with pytest.raises(DataError, match="has no data/trec.jsonl nor trec.jsonl, the file of longbench_trec"):
        read_task(tmp_path, "longbench_trec")
    with pytest.raises(DataError, match="has no lvis_instruct4v_220k.json"):
        conversations.multi_round(tmp_path)
    with pytest.raises(DataError, match="has no text"):
        read_grid(tmp_path)


# DREAM-1K


def test_dream_1k_of_the_hub_and_of_the_repository(tmp_path):
    hub = {"idx": 7, "video_file": "video/7.mp4", "description": "A dog runs.", "events": ["A dog runs."]}
    write(tmp_path, "hub/json/metadata.json", [hub | {"source": "movie_live-action"}])
    own = {"idx": 7, "dataset": "DREAM/movie_live_action", "vid": 7, "text": {"prompt": "p", "response": "A dog runs."}}
    write(tmp_path, "own/DREAM-1k.jsonl", json.dumps(own | {"extra_info": {"events": ["A dog runs."]}}) + "\n\n")
    (row,), (other,) = (list(read_videos(tmp_path / name)["test"]) for name in ("hub", "own"))
    assert row == other
    assert row["category"] == "live_action" and row["video"] == "DREAM-1K_videos/7.mp4"


@each("source", ["movie_animation", "Animation", "stock", "youtube", "shorts", "TikTok-style"])
def test_the_five_categories(tmp_path, source):
    write(tmp_path, "metadata.json", [{"idx": 1, "video_file": "1.mp4", "description": "d", "source": source}])
    (row,) = read_videos(tmp_path)["test"]
    assert row["category"] in ("animation", "stock", "youtube", "tiktok") and row["events"] == []


@each(
    ("change", "message"),
    [
        ({"source": "radio"}, "'radio' is none of its five sources"),
        ({"description": " "}, "the description is empty"),
        ({"events": "A dog runs."}, "events is no list"),
    ],
)
def test_dream_1k_samples_that_are_wrong(tmp_path, change, message):
    entry = {"idx": 1, "video_file": "1.mp4", "description": "d", "source": "stock"}
    write(tmp_path, "metadata.json", [entry, entry | change])
    with pytest.raises(DataError, match=f"sample 1 of .* {message}"):
        read_videos(tmp_path)


def test_a_broken_line_is_named(tmp_path):
    write(tmp_path, "DREAM-1k.jsonl", '{"idx": 1}\n{"idx"')
    with pytest.raises(DataError, match="line 2 of .*DREAM-1k.jsonl is no JSON"):
        read_videos(tmp_path)


# Conversations


def test_which_conversations_are_taken(tmp_path):
    for name in shapes.NAMES:
        (tmp_path / name).mkdir()
        shapes.make(tmp_path / name, name)
    rounds = conversations.multi_round(tmp_path / "multi_round")["test"]
    assert list(rounds["conversation"]) == ["first"] * 8 + ["second"] * 8  # seven rounds, few words, no image: left out
    captions = conversations.long_text(tmp_path / "long_text_vqa")["test"]
    assert [len(text.split()) for text in captions["answer"]] == [300, 420]
    assert len(conversations.description(tmp_path / "llava_description")["test"]) == 4


def test_a_round_has_the_rounds_before_it(tmp_path):
    shapes.make(tmp_path, "multi_round")
    row = conversations.multi_round(tmp_path)["test"][2]
    released = json.loads((tmp_path / "lvis_instruct4v_220k.json").read_text())[0]["conversations"]
    assert row["turns"] == [turn["value"] for turn in released[:5]] and row["answer"] == released[5]["value"]
    assert row["sample_id"] == "first/2"


def test_a_thousand_of_more_are_the_same_thousand_in_the_file_s_order(tmp_path):
    turns = [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}]
    entries = [{"id": f"{i:04d}", "image": f"{i:012d}.jpg", "conversations": turns} for i in range(1500)]
    write(tmp_path, "detail_23k.json", entries)
    first, again = (conversations.description(tmp_path)["test"]["sample_id"] for _ in range(2))
    assert list(first) == list(again) == sorted(first) and len(set(first)) == 1000
    assert first[-1] > "1000"  # not the first thousand
    assert conversations.description(tmp_path)["test"]["image"][0].startswith("coco/train2017/0")
    write(tmp_path, "detail_1k.json", entries[:3])  # the papers' own choice goes first, whole
    assert list(conversations.description(tmp_path)["test"]["sample_id"]) == ["0000", "0001", "0002"]


@each(
    ("turns", "message"),
    [
        ([{"from": "human", "value": "q"}], "no alternation of human and gpt"),
        ([{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}], "no alternation"),
        ([{"from": "human"}, {"from": "gpt", "value": "a"}], "a turn without 'value'"),
        ([], "no alternation"),
    ],
)
def test_conversations_that_are_none(tmp_path, turns, message):
    write(tmp_path, "detail_1k.json", [{"id": "x", "image": "x.jpg", "conversations": turns}])
    with pytest.raises(DataError, match=f"sample 0 of .* {message}"):
        conversations.description(tmp_path)


# LongBench


def test_the_sixteen_english_tasks_with_the_benchmark_s_lengths():
    lengths = {name: task.max_new_tokens for name, task in SUBTASKS.items()}
    assert len(lengths) == 16
    assert sum(lengths.values()) == 128 * 3 + 64 * 4 + 32 * 6 + 512 * 3
    assert {name for name, task in SUBTASKS.items() if task.first_line} == {"trec", "triviaqa", "samsum"}
    for name, task in SUBTASKS.items():
        assert task.prompt.count("{context}") == 1
        asks_nothing = name in ("gov_report", "multi_news", "passage_count", "lcc")
        assert task.prompt.count("{input}") == (0 if asks_nothing else 1)
    assert subtask("longbench_repobench_p") is SUBTASKS["repobench-p"]


def sample(**change):
    return {"input": "i", "context": "c", "answers": ["a"], "all_classes": None, "length": 2, "_id": "x"} | change


def test_longbench_takes_the_benchmark_s_wording_where_it_lies_beside_the_data(tmp_path):
    write(tmp_path, "data/trec.jsonl", json.dumps(sample()) + "\n")
    assert read_task(tmp_path, "longbench_trec")["test"][0]["template"] == SUBTASKS["trec"].prompt
    write(tmp_path, "config/dataset2prompt.json", {"trec": "Theirs: {context} {input}"})
    assert read_task(tmp_path, "longbench_trec")["test"][0]["template"] == "Theirs: {context} {input}"
    write(tmp_path, "config/dataset2prompt.json", {"qasper": "x"})
    with pytest.raises(DataError, match="has no prompt of trec"):
        read_task(tmp_path, "longbench_trec")


def test_longbench_samples_without_answers_are_refused(tmp_path):
    write(tmp_path, "trec.jsonl", json.dumps(sample()) + "\n" + json.dumps(sample(answers=[])) + "\n")
    with pytest.raises(DataError, match="sample 1 of .* has no answers"):
        read_task(tmp_path, "longbench_trec")


def test_context_and_input_are_put_in_as_they_are(tmp_path):
    from mmkv_bench.datasets.tasks.longbench.utils import doc_to_text

    doc = {"template": "T {context} | {input} {other}", "context": "{input} {x}", "input": "a {y}"}
    assert doc_to_text(doc) == "T {input} {x} | a {y} {other}"


# Needle


def letters(text, tokens):
    return text[:tokens]


TEXT = "One two. Three four. Five six. Seven."


def test_the_needle_stands_after_the_last_full_stop_before_its_depth():
    assert hidden(TEXT, "N", 0, letters, 37) == f"\nN\n{TEXT}"
    assert (
        hidden(TEXT, "N", 50, letters, 37) == "One two.\nN\n Three four. Five six. Seven."
    )  # 18 letters in: `Three fou`
    assert hidden(TEXT, "N", 54, letters, 37) == "One two.\nN\n Three four. Five six. Seven."
    assert hidden(TEXT, "N", 55, letters, 37) == "One two. Three four.\nN\n Five six. Seven."
    assert hidden(TEXT, "N", 100, letters, 30) == "One two. Three four. Five six.\nN\n"
    assert hidden("no stop here", "N", 90, letters, 12) == "\nN\nno stop here"


def test_the_grid_has_the_lengths_and_depths_that_it_is_asked_for(tmp_path):
    write(tmp_path, "haystack/a.txt", TEXT)
    asked = {"lengths": [100, 300], "depths": [0, 100], "needle": "N N.", "buffer": 20, "characters_per_token": 2.0}
    write(tmp_path, "needle.json", asked)
    rows = list(read_grid(tmp_path)["test"])
    assert [(row["length"], row["depth"]) for row in rows] == [(100, 0), (100, 100), (300, 0), (300, 100)]
    assert [len(row["context"]) for row in rows] == [
        160,
        160,
        560,
        560,
    ]  # (length - buffer) x 2, the needle's 6 included
    assert rows[0]["context"].startswith("\nN N.\nOne two.") and rows[1]["context"].endswith("\nN N.\n")


def test_the_papers_grid():
    assert len(Settings().lengths) * len(Settings().depths) == 710
    assert (Settings().lengths[0], Settings().lengths[-1]) == (1000, 8000)


def test_lengths_in_tokens_of_a_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    from tests.generation.common import tokenizer

    tokenizer().save_pretrained(tmp_path / "tokenizer")  # two letters a token
    write(tmp_path, "haystack/a.txt", "aabb. ccdd. " * 50)
    asked = {"lengths": [60], "depths": [50], "needle": "ffgg", "buffer": 10, "tokenizer": str(tmp_path / "tokenizer")}
    write(tmp_path, "needle.json", asked)
    (row,) = read_grid(tmp_path)["test"]
    counted = AutoTokenizer.from_pretrained(tmp_path / "tokenizer").encode(row["context"], add_special_tokens=False)
    assert abs(len(counted) - 50) <= 2 and "ffgg" in row["context"]


@each(
    ("asked", "message"),
    [
        ({"length": [5]}, "length in .* is no setting; .*lengths"),
        ([], "what it holds in .* is no setting"),
        ({"lengths": []}, "needs lengths"),
        ({"depths": [120]}, "depths from 0 to 100"),
        ({"lengths": [100]}, "length 100 of needle.json leaves no room"),
        ({"tokenizer": "/nowhere/at/all"}, "the tokenizer /nowhere/at/all of needle.json cannot be loaded"),
    ],
)
def test_needle_settings_that_are_wrong(tmp_path, asked, message):
    write(tmp_path, "a.txt", TEXT)
    write(tmp_path, "needle.json", asked)
    with pytest.raises(DataError, match=message):
        read_grid(tmp_path)


def test_documents_do_not_say_where_a_machine_keeps_them(tmp_path):
    shapes.make(tmp_path, "llava_description")
    rows = list(conversations.description(tmp_path)["test"])
    assert str(tmp_path) not in json.dumps(rows)
