"""MileBench: its sub-tasks and groups, prompts, rules of scoring, the released layout, and the way through the engine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv_bench.config.files import content
from mmkv_bench.datasets import fixtures
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.datasets.task_yaml import own_tasks
from mmkv_bench.datasets.tasks.milebench import metrics, prompt
from mmkv_bench.datasets.tasks.milebench.reading import read
from mmkv_bench.datasets.tasks.milebench.subtasks import HYBRIDKV, PREFIX, SUBTASKS, TITLES, groups
from mmkv_bench.errors import ConfigError, DataError
from mmkv_bench.evaluation.data_check import check
from mmkv_bench.evaluation.fingerprints import fingerprint
from mmkv_bench.evaluation.generating import generate
from mmkv_bench.evaluation.samples import Answer
from mmkv_bench.evaluation.scoring import score
from tests import cover
from tests.each import each
from tests.oracles import milebench as oracle
from tools.fixtures import known as known_answers

CONF = Path(__file__).parents[2] / "conf"
NAMES = tuple(PREFIX + name for name in SUBTASKS)
TEMPORAL = "action_localization action_prediction action_sequence character_order counterfactual_inference "
TEMPORAL += "egocentric_navigation moving_attribute moving_direction object_existence object_interaction "
TEMPORAL += "object_shuffle scene_transition state_change"
SEMANTIC = (
    "alfred clevr_change docvqa iedit mmcoqa multimodalqa nuscenes ocr_vqa slidevqa spot_the_diff tqa webqa wikivqa"
)


def conf(name: str) -> dict:
    return content("dataset", name)


def spec_of(name: str, **node):
    """The dataset as the configuration has it, on its fixture."""
    return spec_from_config(name, conf(name) | node, {"source": "fixture"})


def asked_of(spec) -> list:
    asked = []
    generate(spec, lambda request: asked.append(request) or "")
    return asked


# -- sub-tasks and groups ---------------------------------------------------------------------------------------------


def test_there_are_29_sub_tasks_13_temporal_13_semantic_2_needle_and_1_retrieval():
    found = groups()
    assert set(found["T"]) == {PREFIX + name for name in TEMPORAL.split()}
    assert set(found["S"]) == {PREFIX + name for name in SEMANTIC.split()}
    assert found["NH"] == ("milebench_text_needle", "milebench_image_needle")
    assert found["IR"] == ("milebench_gpr1200",)
    assert len(found["T"]) == len(found["S"]) == 13
    assert sorted([*found["T"], *found["S"], *found["NH"], *found["IR"]]) == sorted(NAMES)
    assert len(NAMES) == len(set(NAMES)) == 29


def test_the_small_groups_share_no_sub_task_and_leave_none_out():
    members = [name for code in TITLES for name in groups()[code]]
    assert sorted(members) == sorted(NAMES)
    sizes = {code: len(groups()[code]) for code in TITLES}
    assert list(sizes.values()) == [3, 4, 2, 4, 4, 3, 3, 2, 1, 2, 1]


def test_the_samples_are_the_6440_of_the_paper():
    assert sum(task.count for task in SUBTASKS.values()) == 6440


def test_only_visual_relations_and_alfred_are_scored_by_rouge():
    assert {n for n, task in SUBTASKS.items() if task.metric == "rouge_l"} == {
        "clevr_change",
        "spot_the_diff",
        "iedit",
        "alfred",
    }


@each("name", NAMES)
def test_task_configuration_and_sub_task_say_the_same(name):
    task, node = SUBTASKS[name.removeprefix(PREFIX)], conf(name)
    assert own_tasks()[name].name == f"{name}.yaml"
    assert (node["task"], node["folder"]) == (name, f"MileBench/{task.folder}")
    assert (node["metrics"], node["about"]["samples"]) == ([task.metric], task.count)
    own = {code: len(members) for code, members in groups().items() if name in members}
    assert node["about"]["groups"] == {"MileBench": own} and own[task.group]
    assert f"part{task.part}.tar.gz" in node["about"]["hub"]
    assert any("HybridKV table 1" in paper for paper in node["about"]["papers"]) == (name[len(PREFIX) :] in HYBRIDKV)


def test_experiments_choose_the_members_of_the_groups():
    chosen = {}
    for file in (CONF / "experiment").glob("milebench*.yaml"):
        (choice,) = yaml.safe_load(file.read_text())["defaults"]
        chosen[file.stem] = tuple(choice["override /dataset"])
    parts = {"t": "T", "s": "S", "nh": "NH", "ir": "IR", "hybridkv": "HybridKV"}
    assert chosen == {"milebench": NAMES} | {f"milebench_{k}": groups()[code] for k, code in parts.items()}


# -- rules of scoring -------------------------------------------------------------------------------------------------

CHOICES = ["a dog", "Two dogs", "no dog at all", "$1,000"]


@each(
    ("answer", "expected"),
    [
        ("B", 1),
        ("b.", 1),
        ("(B) Two dogs", 1),
        ("B. Two dogs", 1),
        ("There are two dogs in it.", 1),
        ("the answer is C", None),  # several letters of options: a in "answer", C
        ("option B", 1),  # its only letter that names one
        ("not a dog; no dog at all", 0),  # the leftmost text counts
        ("cat", None),  # C and A
        ("two", None),
        ("D. $1,000", 3),
        ("$1,000", None),  # texts with a $ are recognised after their letter alone
        ("", None),
        ("...", None),
    ],
)
def test_the_choice_of_an_answer(answer, expected):
    assert metrics.chosen(answer, CHOICES) == expected


def test_an_option_that_begins_with_another_one_is_read_as_that():
    choices = [f"Image {i}" for i in range(1, 13)]
    assert metrics.chosen("Image 12", choices) == 0
    scores = metrics.choice_scores("Image 12", choices, "Image 12")
    assert scores == {"accuracy": 0.0, "exact_match": 1.0, "parse_failed": 0.0}


def test_more_choices_than_letters_have_names_of_two():
    assert [prompt.letter(i) for i in (0, 25, 26, 51, 52, 77)] == ["A", "Z", "AA", "AZ", "BA", "BZ"]
    assert metrics.chosen("ab", [f"choice number {i}" for i in range(30)]) == 27


def test_a_retrieval_with_109_choices_has_names_for_all_and_is_scored():
    assert [prompt.letter(i) for i in (78, 108, 701, 702)] == ["CA", "DE", "ZZ", "AAA"]
    assert len({prompt.letter(i) for i in range(1000)}) == 1000
    choices = [f"Image {i + 1}" for i in range(109)]
    read = {"accuracy": 1.0, "exact_match": 1.0, "parse_failed": 0.0}
    assert metrics.choice_scores("DE", choices, "Image 109") == read
    assert metrics.choice_scores("Image 109", choices, "Image 109")["exact_match"] == 1.0


def test_an_answer_that_names_nothing_scores_zero_and_is_counted():
    nothing = {"accuracy": 0.0, "exact_match": 0.0, "parse_failed": 1.0}
    for reference in CHOICES:  # the third one too, which the benchmark's own scorer gives for an empty answer
        assert metrics.choice_scores("", CHOICES, reference) == nothing
        assert metrics.choice_scores("unseen", ["x", "y", "z"], "x") == nothing


@each(
    ("text", "expected"),
    [
        ("  It's RED.\n", "it's red"),
        ("3.5 metres.", "3.5 metres"),
        ("1,000 (about)", "1000 about"),  # a comma in a number deletes all punctuation
        ("left-right", "left right"),
        ("left - right", "left  right"),  # next to a space it goes
        ('"quoted"', "quoted"),
        ("a" + "." * 40, "a" + "." * 8),  # 32 periods go
    ],
)
def test_normalised_texts(text, expected):
    assert metrics.normalised(text) == expected


texts = st.text(alphabet="ab C.,'$1(-\n", max_size=9)


@settings(max_examples=cover.examples(200), deadline=None)
@given(texts)
def test_texts_are_normalised_as_the_benchmark_does(text):
    assert metrics.normalised(text) == oracle.tidy(text)


@pytest.mark.slow
@settings(max_examples=cover.examples(200), deadline=None)
@given(texts, st.lists(texts.filter(oracle.tidy), min_size=2, max_size=4), st.booleans())
def test_choices_are_read_as_the_benchmark_reads_them(noise, choices, speaks):
    answer = noise + (choices[0] if speaks else "")
    found = metrics.chosen(answer, choices)
    letters = oracle.named_choice(answer, choices)
    assert found == ("ABCD".index(letters) if len(letters) == 1 and letters in "ABCD"[: len(choices)] else None)


def test_needles_are_whole_words_and_contained_references_are_not():
    assert metrics.needle_scores("It is 4821.", "4821")["accuracy"] == 1.0
    assert metrics.needle_scores("48210", "4821")["accuracy"] == 0.0
    assert metrics.contains_scores("48210", "4821")["accuracy"] == 1.0
    assert metrics.contains_scores("Ten years", "ten years") == {"accuracy": 1.0, "exact_match": 1.0}


def test_rouge_of_an_answer_that_meda_released():
    """Sample 3 of CLEVR-Change in MEDA's repository, whose eval_score.json says 0.098."""
    answer = (
        "The image shows two different colored cubes, one green and one yellow, placed on a table. The green cube is "
        "larger than the yellow cube. The table is white, and the cubes are the main focus of the image."
    )
    reference = (
        "the large metal object became purple. the brown cylinder turned purple. the big brown metallic cylinder in "
        "front of the rubber cylinder changed to purple"
    )
    assert round(metrics.rouge_scores(answer, reference)["rouge_l"], 3) == 0.098


# -- prompts ----------------------------------------------------------------------------------------------------------


def doc(context: str, choices=(), images: int = 2, task: str = "milebench_docvqa") -> dict:
    return {"task": task, "sample_id": "7", "instruction": "Look.", "context": context, "choices": list(choices)} | {
        "image_count": images,
        "images": [f"picture {i + 1}" for i in range(images)],
    }


def test_images_stand_where_their_placeholders_are_and_choices_follow():
    (turn,) = prompt.messages(doc("First {image#1}, then {table#2}. Which?", ["one", "two"]))
    assert turn["role"] == "user"
    assert [part.get("text", part.get("url")) for part in turn["content"]] == [
        "Look.\nFirst ",
        "picture 1",
        ", then ",
        "picture 2",
        ". Which?\nChoice list: \nA. one\nB. two\nYour answer is: ",
    ]


def test_a_cut_from_the_left_is_told_the_instruction_and_the_prompt_is_the_same():
    whole, cut = (
        asked_of(spec_of("milebench_docvqa", generation={"max_new_tokens": 8, "cut_prompt": way}))
        for way in (None, "left")
    )
    assert {request.instruction for request in whole} == {""}
    for request, other in zip(cut, whole, strict=True):
        first = request.messages[0]["content"][0]["text"]
        assert (
            request.instruction.endswith("\n") and first.startswith(request.instruction) and request.instruction.strip()
        )
        assert (request.prompt_hash, request.messages) == (other.prompt_hash, other.messages)


def test_retrieval_has_choices_without_letters():
    text = prompt.text(doc("{image#1}{image#2}", ["Image 1", "Image 2"], task="milebench_gpr1200"))
    assert text.endswith("\nChoice list: \nImage 1\nImage 2\nYour answer is: ")


@each("context", ["{image#1}", "{image#1}{image#2}{image#3}", "{image#1}{image#1}", "none"])
def test_a_prompt_with_other_images_than_the_sample_s_is_refused(context):
    with pytest.raises(DataError, match="sample 7 of milebench_docvqa has 2 images"):
        prompt.messages(doc(context))


# -- the released layout ----------------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path):
    """The fixture of DocVQA as the release lays it out, to be damaged."""
    folder = tmp_path / "MileBench" / "DocVQA"
    shutil.copytree(fixtures.folder("milebench_docvqa"), folder)
    return folder


def edited(release: Path, change) -> None:
    file = release / "DocVQA.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_the_release_or_the_sub_task_s_folder_may_be_given(release):
    for folder in (release, release.parent):
        data = read(folder, "milebench_docvqa")["test"]
        assert (len(data), data[0]["image_count"], data[0]["images"][0].size) == (4, 2, (84, 84))


def test_data_root_leads_to_the_sub_task(release):
    spec = spec_from_config("milebench_docvqa", conf("milebench_docvqa"), {"root": str(release.parents[1])})
    assert (spec.dataset, spec.fixture, Path(spec.dataset_path)) == ("milebench_docvqa", False, release)
    with pytest.raises(DataError, match="has no folder MileBench/TQA"):
        spec_from_config("milebench_tqa", conf("milebench_tqa"), {"root": str(release.parents[1])})


def test_without_a_folder_it_says_how_to_get_the_data():
    with pytest.raises((DataError, ConfigError), match=r"hf download FreedomIntelligence/MileBench"):
        generate(spec_from_config("milebench_docvqa", conf("milebench_docvqa")), lambda request: "")


def test_content_and_not_place_decides_the_fingerprint(release, tmp_path):
    moved = tmp_path / "elsewhere" / "DocVQA"
    shutil.copytree(release, moved)
    specs = [
        spec_from_config("milebench_docvqa", conf("milebench_docvqa") | {"dataset_path": str(f)})
        for f in (release, moved)
    ]
    assert fingerprint(specs[0]) == fingerprint(specs[1])
    shutil.copy(moved / "images" / "1_1.png", moved / "images" / "0_0.png")
    other = spec_from_config("milebench_docvqa", conf("milebench_docvqa") | {"dataset_path": f"{moved.parent}"})
    assert fingerprint(other) != fingerprint(specs[0])


def test_a_picture_that_is_missing_or_broken_is_the_error_of_its_sample_alone(release):
    (release / "images" / "1_1.png").unlink()
    (release / "images" / "2_0.png").write_bytes(b"no picture")
    spec = spec_from_config("milebench_docvqa", conf("milebench_docvqa") | {"dataset_path": str(release)})
    errors = [request.error for request in asked_of(spec)]
    assert [error is None for error in errors] == [True, False, False, True]
    assert "FileNotFoundError" in errors[1]
    found = check(spec, conf("milebench_docvqa")["about"])
    assert (found.rows, found.ready) == (4, False)
    assert found.missing == [f"pictures named by samples do not exist: {Path('images', '1_1.png')}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("data"), "KeyError.*meta_data.task_instruction and data"),
        (lambda c: c.update(data=[]), "has no samples"),
        (lambda c: c["data"][2].pop("task_instruction_id"), "sample 2 .*task_instruction_id"),
        (lambda c: c["data"][1].update(task_instruction_id=5), "sample 1 .*IndexError"),
        (lambda c: c["data"][1]["task_instance"].pop("images_path"), "sample 1 .*images_path"),
        (
            lambda c: c["data"][1]["task_instance"].update(images_path=["../DocVQA.json"]),
            "leaves the folder of the pictures",
        ),
        (lambda c: c["data"][3]["task_instance"].pop("choice_list"), "choice_list has 0 choices"),
        (lambda c: c["data"][3].update(response="violet"), "is none of choice_list"),
        (lambda c: c["data"][3].update(response=" . "), "no word"),
    ],
)
def test_files_in_another_schema_are_refused_by_sample_and_key(release, change, message):
    edited(release, change)
    with pytest.raises(DataError, match=message):
        read(release, "milebench_docvqa")


def test_a_file_that_is_no_json_and_a_folder_without_it_are_named(release):
    (release / "DocVQA.json").write_text('{"meta_data": ')
    with pytest.raises(DataError, match="DocVQA.json is not a file of MileBench"):
        read(release, "milebench_docvqa")
    with pytest.raises(DataError, match=r"neither TQA.json nor TQA/TQA.json.*MileBench_part5.tar.gz"):
        read(release, "milebench_tqa")


def test_instructions_may_be_a_table_by_id(release):
    edited(release, lambda c: c["meta_data"].update(task_instruction={"0": "Zero.", "1": "One."}))
    assert read(release, "milebench_docvqa")["test"]["instruction"] == ["Zero.", "One.", "Zero.", "One."]


# -- through the engine -----------------------------------------------------------------------------------------------


@pytest.mark.full
@each("name", NAMES)
def test_a_fixture_s_prompts_and_known_scores(name):
    spec = spec_of(name)
    assert (spec.dataset, spec.fixture) == (f"{name}_fixture", True)
    asked = asked_of(spec)
    samples = json.loads(next(Path(spec.dataset_path).glob("*.json")).read_text())
    assert len(asked) == len(samples["data"]) == 4
    for request, sample in zip(asked, samples["data"], strict=True):
        instance = sample["task_instance"]
        (turn,) = request.messages
        text = "".join(part.get("text", "<image>") for part in turn["content"])
        instruction = samples["meta_data"]["task_instruction"][sample["task_instruction_id"]]
        context = re.sub(r"\{(image|table)#\d\}", "<image>", instance["context"])
        assert text.startswith(f"{instruction}\n{context}")
        assert all(choice in text for choice in instance.get("choice_list", []))
        assert len(request.images) == len(instance["images_path"]) == text.count("<image>")
        assert request.error is None and request.generation["max_new_tokens"] == 512
    known = known_answers(name)
    said = {entry.doc_id: entry.answer for entry in known}
    answers = {r.sample_id: Answer(said[r.doc_id], "ok", r.doc_id, r.prompt_hash) for r in asked}
    found = score(spec, answers)
    scores = {(row.sample_id, row.metric): row.value for row in found.samples}
    expected = {(asked[entry.doc_id].sample_id, entry.metric): entry.value for entry in known}
    assert scores == {key: pytest.approx(value, abs=1e-7) for key, value in expected.items()}
    headline = SUBTASKS[name.removeprefix(PREFIX)].metric
    values = [entry.value for entry in known if entry.metric == headline]
    assert found.aggregate[headline] == pytest.approx(sum(values) / 4, abs=1e-7)
    assert {0.0, 1.0} <= set(values)


def test_pictures_come_in_the_order_of_the_text():
    request = asked_of(spec_of("milebench_gpr1200"))[1]  # query green, image 1 red, image 2 green
    middle = [image.getpixel((42, 42)) for image in request.images]
    assert middle == [(30, 150, 60), (200, 30, 30), (30, 150, 60)]
