"""What the bridge takes for granted of lmms-eval beyond its documented interface, and what the shipped tasks promise it."""

from __future__ import annotations

import inspect
import json

import pytest
import yaml

from mmkv_bench.datasets import task_yaml
from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS
from mmkv_bench.evaluation.documents import documents, generation_settings, task_config
from mmkv_bench.evaluation.environment import lmms_eval
from mmkv_bench.evaluation.scoring import score
from mmkv_bench.evaluation.task_scorer import addresses, sample_value
from tests import cover
from tests.each import each
from tests.evaluation.conftest import answered, ask_all, pages


@pytest.fixture(scope="module")
def harness():
    return lmms_eval(offline=True)


def test_retried_methods_carry_their_plain_functions(harness):
    for name in ("download", "process_results"):
        method = getattr(harness.ConfigurableTask, name)
        assert inspect.isfunction(method.__wrapped__)
        assert hasattr(method, "retry")  # still wrapped by tenacity: else drop the detour
    assert list(inspect.signature(harness.ConfigurableTask.process_results).parameters)[:3] == [
        "self",
        "doc",
        "results",
    ]


@pytest.mark.slow
@cover.shares(4)
def test_functions_of_a_yaml_are_those_that_lmms_eval_loads(harness, share):
    def shown(value):
        if isinstance(value, dict):
            return {key: shown(each) for key, each in value.items()}
        if isinstance(value, list):
            return [shown(each) for each in value]
        if inspect.isfunction(value):
            return value.__qualname__, value.__code__.co_filename
        return repr(value) if inspect.isclass(value) else value

    shipped = task_yaml.lmms_eval_tasks()[0]
    files = [shipped[name] for name in ("docvqa_val", "mmmu_val", "ocrbench", "realworldqa")]
    for file in [*files, *cover.turn(task_yaml.own_tasks().values(), 0, share)]:
        theirs = shown(harness.utils.load_yaml_config(str(file), mode="full"))
        assert shown(harness.load_config(file)) == theirs, file
        assert any(isinstance(value, tuple) for value in theirs.values()), file


def test_the_loop_takes_what_it_is_given(harness):
    given = {"lm", "task_dict", "limit", "bootstrap_iters", "log_samples", "cli_args", "process_docs_parallel"}
    assert given <= set(inspect.signature(harness.evaluator.evaluate).parameters)


def test_requests_in_chat_form_carry_six_arguments(harness):
    spec = pages()
    docs = documents(spec, 1)
    task = harness.AskingTask(task_config(spec), docs.full, docs.bare)
    task.build_all_requests(limit=1)
    (instance,) = task.instances
    _, doc_to_messages, settings, doc_id, name, split = instance.args
    assert (doc_id, name, split, instance.doc_id) == (0, "pages_walk_small", "test", 0)
    assert settings["max_new_tokens"] == 24
    (message,) = doc_to_messages(docs.full["test"][0])
    assert [part["type"] for part in message["content"]] == ["image", "text"]


def test_the_loop_scores_one_document_at_a_time_in_their_order(harness, own_task):
    spec = own_task()
    docs = documents(spec, None)
    seen = []

    def score(doc_id, results, run):
        seen.append((doc_id, results))
        return run()

    task = harness.ScoringTask(task_config(spec), docs.bare, {0, 2, 3}, True, score)
    harness.run_loop(task, harness.Respondent(lambda instance: "c"), limit=4)
    assert seen == [(doc_id, ["c"]) for doc_id in (0, 2, 3)]


def test_lmms_eval_import_leaves_damaged_images_an_error(harness):
    from PIL import ImageFile

    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@each("task", PAGE_TASKS)
def test_the_yaml_of_a_pages_task_generates_as_its_configuration_does(task):
    spec = pages(task, "large")
    assert task_config(spec)["generation_kwargs"] == generation_settings(spec)


def test_pages_are_ordinary_tasks_for_lmms_eval_itself(harness, tmp_path):
    from lmms_eval.tasks import TaskManager, get_task_dict

    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"position": i}) + "\n" for i in range(3)))
    (tmp_path / "mine.yaml").write_text(
        f"include: {task_yaml.OWN_FOLDER / 'pages' / 'pages_walk_small.yaml'}\n"
        f"task: mine\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'three.jsonl'}}}}}\n"
    )
    manager = TaskManager("ERROR", include_path=[str(task_yaml.OWN_FOLDER), str(tmp_path)], include_defaults=False)
    assert {f"{task}_{size}" for task in PAGE_TASKS for size in ("small", "large")} <= set(manager.all_tasks)
    task = get_task_dict(["mine"], manager, "chat")["mine"]
    requests = ask_all(pages(), 3)
    answers = [task.dataset["test"][i]["answer"] for i in range(3)]
    answers[1] = "?"
    prompts = []

    def respond(instance):
        (message,) = instance.args[1](task.dataset["test"][instance.doc_id])
        prompts.append([part.get("text") for part in message["content"]])
        return answers[instance.doc_id]

    results = harness.run_loop(task, harness.Respondent(respond), limit=3)
    assert prompts == [[part.get("text") for part in request.messages[0]["content"]] for request in requests]
    assert results["exact_match,none"] == score(pages(), answered(requests, answers)).aggregate["exact_match"]


@pytest.mark.full
def test_our_catalogue_of_tasks_is_lmms_evals(harness):
    from lmms_eval.tasks import TaskManager

    index = TaskManager("ERROR").task_index
    tasks, groups = task_yaml.lmms_eval_tasks()
    assert set(tasks) == {name for name, entry in index.items() if entry["type"] in ("task", "python_task")}
    assert not groups & set(tasks)


def test_addresses_of_judges_are_found_in_shipped_scorers_and_in_no_others(harness, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # videochatgpt reads it when it is imported
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("OPENAI_API_URL", "https://judge.example/v1")
    from lmms_eval.tasks.mmbench import en_utils as mmbench
    from lmms_eval.tasks.mmmu import utils as mmmu
    from lmms_eval.tasks.muirbench import utils as muirbench
    from lmms_eval.tasks.ocrbench import utils as ocrbench
    from lmms_eval.tasks.videochatgpt import utils as videochatgpt

    without = (mmmu.mmmu_process_results, muirbench.muir_process_results, ocrbench.ocrbench_process_results)
    assert [addresses(scorer) for scorer in without] == [set()] * 3
    asking = (videochatgpt.videochatgpt_process_results_generic, mmbench.mmbench_aggregate_dev_results_eval)
    assert all(address.startswith("http") for scorer in asking for address in addresses(scorer))
    assert all(addresses(scorer) for scorer in asking)


def test_values_of_shipped_scorers_become_scores(harness):
    from lmms_eval.tasks.muirbench.utils import muir_aggregation, muir_process_results
    from lmms_eval.tasks.seedbench.utils import seed_aggregation_result_all

    doc = {"task": "t", "idx": 0, "image_relation": "r", "answer": "B", "image_type": "i"}
    for text, expected in (("B", 1.0), ("C", 0.0)):
        raw = muir_process_results(doc, [text])["muirbench_score_overall"]
        assert sample_value("muirbench_score_overall", raw, muir_aggregation) == expected
    pair = {"pred": "a", "answer": "A", "question_id": 1}
    assert sample_value("seed_all", pair, seed_aggregation_result_all) == 1.0


def test_pages_yaml_is_free_of_paths():
    for path in (task_yaml.OWN_FOLDER / "pages").glob("*yaml"):
        text = path.read_text().replace("!function ", "")
        assert "/" not in str(yaml.safe_load(text))
