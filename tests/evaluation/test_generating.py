"""lmms-eval's loop asks: what arrives in a request, and what gets out of the loop."""

from __future__ import annotations

import importlib
import io
import os
import sys

import pytest

from mmkv_bench.datasets.messages import Conversation, prompt_hash, stated
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.errors import ConfigError, DataError, UnsupportedError
from mmkv_bench.evaluation.documents import generation_settings, sample_refs
from mmkv_bench.evaluation.environment import task_errors
from mmkv_bench.evaluation.generating import generate
from mmkv_bench.tiny.pages import make_sample
from tests.each import each
from tests.evaluation.conftest import ask_all, pages


@pytest.mark.slow
def test_a_request_is_the_sample_in_the_form_the_embedded_model_was_trained_on():
    requests = ask_all(pages("pages"), 10)
    assert [request.doc_id for request in requests] == list(range(10))
    request = requests[4]
    sample = make_sample("mi_walk3", "small", "test", 0)
    text = {"type": "text", "text": sample.question}
    assert request.messages == [{"role": "user", "content": [{"type": "image"}] * 4 + [text]}]
    assert [image.tobytes() for image in request.images] == [image.tobytes() for image in sample.images]
    assert {image.mode for image in request.images} == {"RGB"}
    assert (request.sample_id, request.cluster, request.kind) == (sample.sample_id, sample.cluster, "mi_walk3")
    assert (request.dataset, request.videos, request.error) == ("pages_small", [], None)
    assert request.prompt_hash == prompt_hash(Conversation(request.messages, request.images, []))
    assert request.generation == {"max_new_tokens": 24, "until": [], "do_sample": False}
    assert len({request.prompt_hash for request in requests}) == 10


def test_the_configuration_wins_over_the_task_and_greedy_over_a_temperature(own_task):
    settings = "{max_new_tokens: 7, temperature: 0.7, do_sample: true, until: END, num_beams: 2}"
    spec = own_task(generation_kwargs=settings)
    expected = {"max_new_tokens": 7, "do_sample": False, "until": ["END"], "num_beams": 2}
    assert generation_settings(spec) == expected
    node = {"task": spec.name, "include_path": spec.include_path, "generation": {"max_new_tokens": 3}}
    assert generation_settings(spec_from_config("lmms_eval", node)) == expected | {"max_new_tokens": 3}
    assert ask_all(spec)[0].generation == expected


def test_a_task_without_settings_gets_the_defaults_and_no_stop_string(own_task):
    assert ask_all(own_task())[0].generation == {"max_new_tokens": 128, "until": [], "do_sample": False}


@pytest.mark.slow
def test_unwanted_samples_are_neither_asked_nor_decoded(monkeypatch):
    import datasets

    decoded = []
    decode = datasets.Image.decode_example
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *a, **k: decoded.append(1) or decode(*a, **k))
    asked = []
    calls = generate(
        pages(), lambda request: asked.append(request.doc_id) or "", 10, wanted=lambda ref: ref.doc_id in (3, 7)
    )
    assert (calls, asked) == (2, [3, 7])
    assert len(decoded) <= 6  # the two and lmms-eval's look at the first document; datasets decodes each twice


class Odd(Exception):
    """An exception that nobody else raises."""


@each("error", [Odd("x"), KeyboardInterrupt(), SystemExit(3), ImportError("y"), DataError("z")])
def test_what_the_answer_raises_arrives_unchanged_and_ends_the_loop(error):
    error.__cause__ = cause = ValueError("its cause")
    calls = []

    def answer(request):
        calls.append(request.doc_id)
        if request.doc_id == 1:
            raise error
        return ""

    with pytest.raises(type(error)) as caught:
        generate(pages(), answer, 5)
    assert caught.value is error
    assert error.__cause__ is cause
    assert calls == [0, 1]


def test_an_answer_may_print_and_lmms_eval_may_not(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    generate(pages(), lambda request: print("seen", file=sys.stderr) or "", 2)
    assert (out.getvalue(), err.getvalue()) == ("", "seen\nseen\n")
    assert sys.stdout is out


def test_the_environment_is_left_as_it_was_and_a_judges_key_is_hidden_meanwhile(own_task, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "a real one")
    spec = own_task()
    ask_all(spec)  # libraries set variables of their own when they are first imported
    before = dict(os.environ)
    seen = []
    generate(spec, lambda request: seen.append(os.environ.get("OPENAI_API_KEY")) or "")
    assert len(seen) == 4 and "a real one" not in seen
    assert {key: value for key, value in os.environ.items() if "OFFLINE" not in key} == {
        key: value for key, value in before.items() if "OFFLINE" not in key
    }


def test_a_task_that_reads_its_home_and_key_while_loading_finds_them(own_task, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    spec = own_task(name="homely")
    utils = os.path.join(spec.include_path, "utils.py")
    with open(utils, "a") as file:
        file.write("\nimport os\nHOME, KEY = os.environ['HF_HOME'], os.environ['OPENAI_API_KEY']\n")
    assert len(ask_all(spec)) == 4
    assert "OPENAI_API_KEY" not in os.environ


def test_a_task_that_exits_the_process_is_an_error_that_names_it(own_task):
    spec = own_task(name="leaver", doc_to_text="!function utils.exiting_question")
    with pytest.raises(DataError, match="leaver.*the videos are not there"):
        ask_all(spec)


def test_a_task_that_exits_the_process_for_a_samples_video_gives_that_sample_an_error(own_task):
    spec = own_task(name="blind", doc_to_visual="!function utils.exiting_question")
    errors = [request.error for request in ask_all(spec)]
    assert len(errors) == 4 and all("the videos are not there" in error for error in errors)


def test_a_task_whose_package_is_missing_is_an_error_that_names_both(own_task):
    spec = own_task(name="needy")
    with open(os.path.join(spec.include_path, "utils.py"), "a") as file:
        file.write("\nimport a_package_that_is_not_there\n")
    with pytest.raises(DataError, match="needy.*a_package_that_is_not_there"):
        ask_all(spec)


def test_data_that_are_not_there_fail_at_once_and_say_what_to_do(own_task, monkeypatch):
    import time

    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited to try again"))
    spec = own_task(name="empty", dataset_kwargs="{data_files: {test: none.jsonl}}")
    with pytest.raises(DataError, match="empty.*dataset_path"):
        ask_all(spec)


@pytest.mark.parametrize("yaml", [{"output_type": "loglikelihood"}, {"repeats": 4}])
def test_tasks_that_ask_for_more_than_one_answer_are_refused(own_task, yaml):
    with pytest.raises(UnsupportedError, match="generate_until"):
        ask_all(own_task(**yaml))


def test_ranks_of_a_launcher_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="shard=i/n"):
        ask_all(pages(), 1)


@pytest.fixture
def picture_task(tmp_path, own_task):
    """A task over a local folder of parquet files with pictures; the second one is damaged, two are equal."""
    import datasets
    from PIL import Image

    def png(colour: str) -> bytes:
        buffer = io.BytesIO()
        Image.effect_noise((32, 32), 50).convert("RGBA" if colour == "green" else "RGB").save(buffer, "PNG")
        return buffer.getvalue()

    first = png("red")
    pictures = [first, png("blue")[:-200], png("green"), first]
    rows = {
        "image": [{"bytes": picture, "path": None} for picture in pictures],
        "question": ["q0", "q1", "q2", "q3"],
        "answer": list("abcd"),
        "book": ["x", "x", "y", "y"],
    }
    features = {name: datasets.Value("string") for name in ("question", "answer", "book")}
    data = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image(), **features}))
    folder = tmp_path / "pictures" / "data"
    folder.mkdir(parents=True)
    data.to_parquet(folder / "test-00000-of-00001.parquet")
    spec = own_task(name="pictures", doc_to_visual="!function utils.picture", dataset_path="nobody/nothing")
    with open(os.path.join(spec.include_path, "utils.py"), "a") as file:
        file.write('\ndef picture(doc):\n    return [doc["image"]]\n')
    node = {"task": "pictures", "include_path": spec.include_path, "dataset_path": str(folder.parent)}
    return lambda **more: spec_from_config("lmms_eval", node | more)


def test_a_damaged_picture_is_that_samples_error_and_the_rest_goes_on(picture_task):
    requests = ask_all(picture_task())
    assert [request.error is None for request in requests] == [True, False, True, True]
    assert requests[1].sample_id in requests[1].error
    assert (requests[1].messages, requests[1].images, requests[1].prompt_hash) == ([], [], "")
    assert [request.messages[0]["content"][-1]["text"] for request in requests if not request.error] == [
        "q0",
        "q2",
        "q3",
    ]
    assert requests[2].images[0].mode == "RGB"


def test_bytes_that_are_no_picture_are_the_same_words_in_every_run(picture_task, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    spec = picture_task()
    file = next((tmp_path / "pictures").rglob("*.parquet"))
    table = pq.read_table(file)
    rows = table["image"].to_pylist()
    broken = pa.array(
        [rows[0]] + [{"bytes": b"no picture", "path": None}] * (len(rows) - 1), table.schema.field("image").type
    )
    pq.write_table(table.set_column(0, table.schema.field("image"), broken), file)
    errors = [[request.error for request in ask_all(spec)] for _ in range(2)]
    assert errors[0] == errors[1]
    why = "cannot be read: an image does not decode (UnidentifiedImageError)"
    assert errors[0] == [None, *(f"sample {spec.dataset}-{i:06d} {why}" for i in (1, 2, 3))]


def test_what_a_row_says_of_an_exception_has_no_address(tmp_path):
    assert stated(ValueError(f"{object()} is odd")) == "ValueError('<object object> is odd')"
    assert stated(OSError(5, "bad")) == "OSError(5, 'bad')"


def test_samples_with_equal_pictures_or_an_equal_field_share_a_cluster(picture_task):
    clusters = [ref.cluster for ref in sample_refs(picture_task(), None)]
    assert clusters[0] == clusters[3]
    assert len(set(clusters)) == 3
    assert [ref.cluster for ref in sample_refs(picture_task(cluster_key="book"), None)] == ["x", "x", "y", "y"]
    with pytest.raises(DataError, match="cluster_key='page'.*question"):
        sample_refs(picture_task(cluster_key="page"), None)


def test_hub_data_are_refused_when_the_hub_is_online_already(picture_task, own_task, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "datasets--nobody--nothing" / "snapshots" / "0123").mkdir(parents=True)
    assert len(sample_refs(picture_task(), None)) == 4
    with pytest.raises(ConfigError, match="offline=false"):
        ask_all(own_task(name="far", dataset_path="nobody/nothing"))


def test_a_task_that_needs_a_package_of_its_own_names_it(monkeypatch):
    """decord is no requirement of this project or of lmms-eval; tasks of the latter import it."""
    monkeypatch.setitem(sys.modules, "decord", None)
    said = "longvideobench needs a missing package: .*decord.*; install it"
    with pytest.raises(DataError, match=said), task_errors("longvideobench", code=True):
        importlib.import_module("lmms_eval.tasks.longvideobench.utils")
