"""Our own tasks on their fixtures, through lmms-eval's loop: prompts, media, and scores that are known beforehand."""

from __future__ import annotations

import pytest
import yaml

from mmkv_bench.config.files import content
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.datasets.task_yaml import own_tasks
from mmkv_bench.datasets.tasks.longbench.subtasks import own_name, subtask
from mmkv_bench.errors import DataError
from mmkv_bench.evaluation.documents import generation_settings
from mmkv_bench.evaluation.fingerprints import fingerprint
from mmkv_bench.evaluation.generating import generate
from mmkv_bench.evaluation.samples import Answer
from mmkv_bench.evaluation.scoring import score
from tests.each import each
from tests.evaluation.conftest import ask_all
from tools.fixtures import conversations, longbench
from tools.fixtures import known as known_answers

TEXT = ("needle", *longbench.NAMES)
PICTURES = (*conversations.NAMES, "mmvet_prefixkv")
VIDEOS = ("favor_bench", "dream1k")
UNJUDGED = (*TEXT, *PICTURES, "favor_bench")


def spec_of(name: str, **data):
    node = content("dataset", name)
    return spec_from_config(name, node, data or {"source": "fixture"})


def text_of(request) -> str:
    return "\n".join(part["text"] for turn in request.messages for part in turn["content"] if part["type"] == "text")


@pytest.fixture(scope="module")
def asked():
    """A dataset's requests, made once."""
    made: dict[str, tuple] = {}

    def of(name: str):
        if name not in made:
            spec = spec_of(name)
            made[name] = spec, ask_all(spec)
        return made[name]

    return of


@pytest.mark.full
@each("name", UNJUDGED)
def test_scores_are_those_known_beforehand(name, asked):
    spec, requests = asked(name)
    known = known_answers(name)
    assert {entry.doc_id for entry in known} <= set(range(len(requests)))
    answers_of = {doc: list(dict.fromkeys(e.answer for e in known if e.doc_id == doc)) for doc in range(len(requests))}
    checked = set()
    for turn in range(max(map(len, answers_of.values()))):
        said = {doc: texts[turn] if turn < len(texts) else "" for doc, texts in answers_of.items()}
        answers = {r.sample_id: Answer(said[r.doc_id], "ok", r.doc_id, r.prompt_hash) for r in requests}
        found = {(row.sample_id, row.metric): row.value for row in score(spec, answers).samples}
        for number, entry in enumerate(known):
            if said[entry.doc_id] == entry.answer:
                value = found[requests[entry.doc_id].sample_id, entry.metric]
                assert value == pytest.approx(entry.value, abs=1e-7), entry
                checked.add(number)
    assert len(checked) == len(known)
    values = {entry.value for entry in known}
    assert 0.0 in values and 1.0 in values


@pytest.mark.slow
@each("name", UNJUDGED, keep=6)
def test_an_empty_answer_scores_nothing(name, asked):
    spec, requests = asked(name)
    answers = {r.sample_id: Answer("", "ok", r.doc_id, r.prompt_hash) for r in requests}
    found = score(spec, answers)
    assert {row.value for row in found.samples if row.metric in spec.metrics} == {0.0}
    assert all(found.aggregate[metric] == 0.0 for metric in spec.metrics)


@pytest.mark.slow
@each("name", (*UNJUDGED, "dream1k"))
def test_prompts_carry_what_the_task_shows(name, asked):
    spec, requests = asked(name)
    assert not any(request.error for request in requests)
    kinds = {part["type"] for r in requests for turn in r.messages for part in turn["content"]}
    media = {"image": sum(len(r.images) for r in requests), "video": sum(len(r.videos) for r in requests)}
    assert media["image"] == (len(requests) if name in PICTURES else 0)
    assert media["video"] == (len(requests) if name in VIDEOS else 0)
    assert kinds == {"text"} | ({"image"} if name in PICTURES else {"video"} if name in VIDEOS else set())
    assert generation_settings(spec)["do_sample"] is False
    assert len({r.prompt_hash for r in requests}) >= len(requests) / 2


@each("name", (*UNJUDGED, "dream1k"))
def test_configurations_agree_with_their_tasks(name):
    node = content("dataset", name)
    task = yaml.safe_load(own_tasks()[node["task"]].read_text().replace("!function", ""))
    common = own_tasks()[node["task"]].parent / "_common_yaml"
    if "include" in task:
        task = yaml.safe_load(common.read_text().replace("!function", "")) | task
    assert node["generation"]["max_new_tokens"] == task["generation_kwargs"]["max_new_tokens"]
    listed = {entry["metric"] for entry in task["metric_list"]}
    assert set(node["metrics"]) <= listed
    assert {entry.metric for entry in known_answers(name)} <= listed
    assert {"title", "hub", "licence", "size", "samples", "papers", "judge", "traps", "source"} <= set(node["about"])


def test_references_of_perplexity_are_the_data_s_answers(asked):
    spec, requests = asked("llava_description")
    assert spec.measures == ("ppl", "self_rouge")
    assert requests[0].reference == "A red circle stands alone on plain white ground"
    assert all(request.reference for name in PICTURES for request in asked(name)[1])


def test_the_picture_stands_where_its_placeholder_does(asked):
    _, requests = asked("llava_description")
    orders = [[part["type"] for part in request.messages[0]["content"]] for request in requests]
    assert orders == [["image", "text"], ["text", "image"], ["image", "text"], ["image", "text"]]
    assert requests[1].messages[0]["content"][0]["text"] == "What is shown?"
    assert requests[0].images[0].getpixel((56, 56))[0] > 200 > 100 > requests[0].images[0].getpixel((56, 56))[2]


def test_prefixkv_asks_mm_vet_the_bare_question_and_then_shows_the_image(asked):
    _, requests = asked("mmvet_prefixkv")
    assert [request.messages for request in requests[:1]] == [
        [{"role": "user", "content": [{"type": "text", "text": "What colour is the square?\n"}, {"type": "image"}]}]
    ]
    assert [request.reference for request in requests[:3]] == ["red", "HARBOUR", "19"]
    assert all(len(request.images) == 1 for request in requests)


def test_later_rounds_follow_earlier_answers(asked):
    _, requests = asked("multi_round")
    turns = requests[3].messages
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 3 + ["user"]
    assert turns[1]["content"] == [{"type": "text", "text": requests[0].reference}]
    assert [len(r.messages) for r in requests[:8]] == list(range(1, 16, 2))
    assert len({r.cluster for r in requests}) == 2  # a conversation's rounds are drawn together


def test_a_picture_that_is_not_there_is_its_sample_s_error(tmp_path):
    folder = tmp_path / "llava_description"
    folder.mkdir()
    conversations.make(folder, "llava_description")
    (folder / "media" / conversations.SHAPES[1][2]).unlink()
    broken = folder / "media" / conversations.SHAPES[2][2]
    broken.write_bytes(broken.read_bytes()[:300])
    requests = ask_all(spec_of("llava_description", root=str(tmp_path)))
    assert [request.error is None for request in requests] == [True, False, False, True]
    assert all("cannot be read" in request.error for request in requests[1:3])


def test_a_clip_that_is_not_there_is_its_sample_s_error(tmp_path):
    from tools.fixtures import favor_bench

    folder = tmp_path / "favor_bench"
    folder.mkdir()
    favor_bench.make(folder)
    (folder / "media" / "videos" / "VR_b2_7.mp4").unlink()
    requests = ask_all(spec_of("favor_bench", root=str(tmp_path)))
    assert [request.error is None for request in requests] == [True] * 3 + [False] * 3


def test_all_longbench_tasks_share_a_folder(tmp_path):
    folder = tmp_path / "longbench"
    for name in ("longbench_trec", "longbench_lcc"):
        folder.mkdir(exist_ok=True)
        if not (folder / "data").exists():
            longbench.make(folder, name)
        else:
            made = tmp_path / name
            made.mkdir()
            longbench.make(made, name)
            (made / "data" / f"{own_name(name)}.jsonl").rename(folder / "data" / f"{own_name(name)}.jsonl")
    for name in ("longbench_trec", "longbench_lcc"):
        spec = spec_of(name, root=str(tmp_path))
        assert len(ask_all(spec)) == 4 and spec.dataset == name
    with pytest.raises(DataError, match="qasper.jsonl"):
        ask_all(spec_of("longbench_qasper", root=str(tmp_path)))


@each("name", ("favor_bench", "needle", "longbench_trec"))
def test_without_local_files_a_task_says_what_to_get(name):
    node = content("dataset", name)
    with pytest.raises(DataError, match="set data.root=<folder>"):
        generate(spec_from_config(name, node), lambda request: "")


def test_longbench_prompts_hold_their_context_and_input(asked):
    for name in longbench.NAMES:
        for number, request in enumerate(asked(name)[1]):
            question, context, _ = longbench.SAMPLES[subtask(name).scorer][number]
            assert context in text_of(request)
            assert question in text_of(request) or "{input}" not in subtask(name).prompt


def test_the_needle_is_in_every_prompt_at_its_depth(asked):
    from tools.fixtures.needle import NEEDLE

    _, requests = asked("needle")
    places = [text_of(request).index(NEEDLE) / len(text_of(request)) for request in requests]
    assert places[0] < 0.1 and 0.3 < places[1] < 0.6 and places[2] > 0.8
    assert all(text_of(request).count(NEEDLE) == 1 for request in requests)
    assert len(text_of(requests[3])) > 1.8 * len(text_of(requests[0]))


def test_questions_about_one_text_are_drawn_together(asked):
    clusters = [request.cluster for request in asked("longbench_qasper")[1]]
    assert clusters[0] == clusters[1] and len(set(clusters)) == 3


def test_a_category_of_dream_1k_alone():
    node = content("dataset", "dream1k") | {"split": "youtube"}
    (request,) = ask_all(spec_from_config("dream1k", node, {"source": "fixture"}))
    assert request.videos[0].endswith("/4.mp4")
    with pytest.raises(
        DataError, match="no split 'radio'; allowed: test, animation, live_action, stock, youtube, tiktok"
    ):
        ask_all(spec_from_config("dream1k", node | {"split": "radio"}, {"source": "fixture"}))


def test_favor_bench_names_its_options_in_the_prompt(asked):
    _, requests = asked("favor_bench")
    assert '"It moves right", "It moves right and then up", "It moves left"' in text_of(requests[0])


def test_content_decides_the_fingerprint_and_not_its_place(tmp_path):
    prints = []
    for place in ("a", "b"):
        folder = tmp_path / place / "longbench"
        folder.mkdir(parents=True)
        longbench.make(folder, "longbench_trec")
        prints.append(fingerprint(spec_of("longbench_trec", root=str(tmp_path / place))))
    file = tmp_path / "b" / "longbench" / "data" / "trec.jsonl"
    file.write_text(file.read_text().replace("noon", "dawn"))
    (tmp_path / "c").mkdir()
    (tmp_path / "b" / "longbench").rename(tmp_path / "c" / "longbench")
    prints.append(fingerprint(spec_of("longbench_trec", root=str(tmp_path / "c"))))
    assert prints[0] == prints[1] != prints[2]
