"""Where a dataset's data come from: a folder below data.root, a fixture, its own path; every layout and what is wrong."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from mmkv_bench.config.files import content, options
from mmkv_bench.datasets import fixtures, local_data
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.datasets.task_yaml import own_tasks, task_file
from mmkv_bench.errors import ConfigError, MissingDataError
from mmkv_bench.evaluation.documents import documents, sample_refs
from mmkv_bench.evaluation.environment import task_environment
from tests.each import each
from tests.evaluation.conftest import ask_all

PAGE = {"question": "what?", "answers": ["a", "b"], "ucsf_document_id": "d1"}


def node(name: str, **change) -> dict:
    return content("dataset", name) | change


def write(file: Path, rows: list[dict], picture: str | None = "image") -> Path:
    """Rows as a parquet file, each with a small picture of its own."""
    import datasets
    from PIL import Image

    features = datasets.Dataset.from_list(rows).features
    if picture:
        rows = [row | {picture: Image.new("RGB", (28, 28), (i, 0, 0))} for i, row in enumerate(rows)]
        features = datasets.Features({**features, picture: datasets.Image()})
    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows, features=features).to_parquet(file)
    return file


@pytest.fixture
def root(tmp_path) -> Path:
    """A data.root with two documents of DocVQA."""
    write(tmp_path / "docvqa" / "data" / "validation-00000-of-00001.parquet", [PAGE, PAGE | {"question": "who?"}])
    return tmp_path


def docvqa(root: Path, **change):
    return spec_from_config("docvqa", node("docvqa", **change), {"root": str(root)})


# ---------------------------------------------------------------------- which source
@pytest.mark.full
def test_a_dataset_below_data_root_keeps_its_name_and_needs_no_connection(root):
    spec = docvqa(root)
    assert (spec.dataset, spec.fixture, spec.offline, spec.media_root) == ("docvqa", False, True, None)
    requests = ask_all(spec)
    assert [request.cluster for request in requests] == ["d1", "d1"]
    assert requests[1].messages[0]["content"][1]["text"].startswith("who?")
    assert requests[0].generation == {"max_new_tokens": 32, "until": [], "do_sample": False}


@pytest.mark.full
def test_a_fixture_has_a_name_of_its_own(root):
    spec = spec_from_config("ocrbench", node("ocrbench"), {"source": "fixture", "root": str(root)})
    assert (spec.dataset, spec.fixture, spec.offline) == ("ocrbench_fixture", True, True)
    assert len(sample_refs(spec, None)) >= 4


def test_pages_make_their_own_data_whatever_the_source(root):
    plain = spec_from_config("pages_walk", node("pages_walk", size="small"))
    for data in ({"source": "fixture"}, {"root": str(root)}):
        assert spec_from_config("pages_walk", node("pages_walk", size="small"), data) == plain


@pytest.mark.slow
def test_a_datasets_own_path_goes_before_data_root(root, tmp_path):
    mine = write(tmp_path / "mine" / "validation.parquet", [PAGE | {"question": "mine?"}]).parent
    spec = docvqa(root, dataset_path=str(mine))
    assert (spec.dataset, spec.offline) == ("docvqa", True)
    assert ask_all(spec)[0].messages[0]["content"][1]["text"].startswith("mine?")


def test_a_root_without_the_dataset_and_a_dataset_without_a_fixture_are_refused(root):
    with pytest.raises(MissingDataError, match="data.root=.* has no folder chartqa; put") as refused:
        spec_from_config("chartqa", node("chartqa"), {"root": str(root)})
    assert refused.value.exit_code == 2
    with pytest.raises(ConfigError, match="dataset 'mmlu' has no fixture.*data.root"):
        spec_from_config("lmms_eval", {"task": "mmlu"}, {"source": "fixture"})


def test_a_measure_that_does_not_exist_is_refused():
    assert spec_from_config("mmvet", node("mmvet", measures=["ppl"])).measures == ("ppl",)
    with pytest.raises(ConfigError, match="datasets.mmvet.measures='pll' is unknown; allowed: continuation, ppl"):
        spec_from_config("mmvet", node("mmvet", measures=["pll"]))


def test_tasks_of_this_project_go_before_those_of_lmms_eval():
    assert own_tasks() and not any(path.parent.name == "pages" for path in own_tasks().values())
    for name, path in own_tasks().items():
        assert task_file(spec_from_config("lmms_eval", {"task": name})) == path


# ---------------------------------------------------------------------- layouts
README = """---
configs:
- config_name: other
  data_files: [{split: hrbench_4k, path: "wrong.parquet"}]
- config_name: hrbench_version_split
  data_files:
  - {split: hrbench_4k, path: "hr_bench_4k.parquet"}
  - {split: hrbench_8k, path: ["a/*.parquet", "b/x.parquet"]}
---
# HR-Bench
"""


@each(
    ("names", "config", "split", "expected"),
    [
        (["data/val-00000-of-00002.parquet", "data/val-00001-of-00002.parquet", "data/test-0.parquet"], None, "val", 2),
        (
            ["DocVQA/validation-00000-of-00001.parquet", "InfographicVQA/validation-0.parquet"],
            "DocVQA",
            "validation",
            1,
        ),
        (["data/DocVQA/validation-0.parquet", "data/validation-0.parquet"], "DocVQA", "validation", 1),
        (["validation.parquet"], "DocVQA", "validation", 1),
        (["data/dev-0.parquet"], None, "validation", 1),
        (["data/val-0.parquet", "data/validation-0.parquet"], None, "validation", 1),
        (["test/0000.parquet", "test/0001.parquet"], None, "test", 2),
        (["README.md", "hr_bench_4k.parquet", "wrong.parquet"], "hrbench_version_split", "hrbench_4k", 1),
        (["README.md", "a/1.parquet", "a/2.parquet", "b/x.parquet"], "hrbench_version_split", "hrbench_8k", 3),
        (["media/hidden/test-0.parquet", "test-0.parquet"], None, "test", 1),
    ],
)
def test_a_split_is_found_in_every_layout_of_the_hub(tmp_path, names, config, split, expected):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(README if name == "README.md" else "")
    found = local_data.find(tmp_path, config, split)
    assert (found.kind, len(found.files)) == ("parquet", expected)
    assert not any("wrong" in file.name or "Infographic" in str(file) for file in found.files)
    assert found.source()["dataset_kwargs"] == {"data_files": {split: [str(file) for file in found.files]}}
    assert found.source()["dataset_name"] is None


def test_split_names_that_datasets_would_change_are_kept(tmp_path):
    row = {"image_id": "1", "caption_str": ["a sign"]}
    write(tmp_path / "textcaps" / "data" / "val-00000-of-00001.parquet", [row])
    assert len(sample_refs(spec_from_config("textcaps", node("textcaps"), {"root": str(tmp_path)}), None)) == 1


def test_a_folder_of_save_to_disk_is_read_and_its_splits_are_known(root):
    import datasets

    file = root / "docvqa" / "data" / "validation-00000-of-00001.parquet"
    data = datasets.Dataset.from_parquet(str(file))
    datasets.DatasetDict({"validation": data}).save_to_disk(root / "saved")
    spec = docvqa(root, dataset_path=str(root / "saved"))
    assert len(ask_all(spec)) == 2
    with pytest.raises(MissingDataError, match="no split 'test'; allowed: validation"):
        sample_refs(docvqa(root, dataset_path=str(root / "saved"), split="test"), None)


@pytest.mark.parametrize("declared", [False, True])
def test_pictures_that_pandas_wrote_are_pictures(root, declared):
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = root / "docvqa" / "data" / "validation-00000-of-00001.parquet"
    expected = [request.prompt_hash for request in ask_all(docvqa(root, split="validation"))]
    rows = [row | {"image": row["image"] | {"path": None}} for row in pq.read_table(file).to_pylist()]
    (root / "plain" / "docvqa").mkdir(parents=True)
    plain = root / "plain" / "docvqa" / "validation.parquet"
    if declared:  # as dicts, by `datasets` itself
        datasets.Dataset.from_list(rows).to_parquet(plain)
    else:
        pq.write_table(pa.Table.from_pylist(rows), plain)
    spec = docvqa(root / "plain", cluster_key=None)
    requests = ask_all(spec)
    assert [request.prompt_hash for request in requests] == expected and all(expected)
    assert len({request.cluster for request in requests}) == 2, "of their bytes"
    found = documents(spec, None)
    assert "image" in found.full["validation"].column_names and "image" not in found.bare["validation"].column_names


def test_lists_of_plain_pictures_are_pictures_and_videos_are_not(tmp_path):
    import datasets
    import PIL.Image
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    PIL.Image.new("RGB", (28, 28)).save(buffer, "PNG")
    medium = {"bytes": buffer.getvalue(), "path": "x.png"}
    row = {"image_list": [medium], "image": medium, "video": medium, "pair": {"bytes": "text", "path": "x"}, "n": 1}
    file = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    found = local_data.picture_features([str(file)])
    assert found["image_list"] == datasets.List(datasets.Image()) and found["image"] == datasets.Image()
    assert (
        isinstance(found["video"], dict) and isinstance(found["pair"], dict) and found["n"] == datasets.Value("int64")
    )
    data = datasets.load_dataset("parquet", data_files={"test": [str(file)]}, features=found, cache_dir=tmp_path / "c")
    assert [data["test"][0]["image"].size, data["test"][0]["image_list"][0].size] == [(28, 28)] * 2
    pq.write_table(pa.Table.from_pylist([{"n": 1}]), file)
    assert local_data.picture_features([str(file)]) is None


# ---------------------------------------------------------------------- what can be wrong
def test_an_empty_folder_is_one_sentence(tmp_path):
    (tmp_path / "docvqa").mkdir()
    with pytest.raises(MissingDataError, match="has no data files; put data/validation-00000-of-00001.parquet"):
        sample_refs(docvqa(tmp_path), None)


def test_a_wrong_split_names_those_that_are_there(root):
    with pytest.raises(MissingDataError, match="no split 'test'; allowed: validation; .*split="):
        sample_refs(docvqa(root, split="test"), None)


@pytest.mark.parametrize("keep", [0, 3, 500, -100])
def test_a_truncated_parquet_is_named(root, keep):
    file = root / "docvqa" / "data" / "validation-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(MissingDataError, match=f"{file} is truncated or not a parquet file .*download it again"):
        sample_refs(docvqa(root), None)


def test_a_parquet_with_damaged_pages_is_an_error_that_says_so(root):
    file = root / "docvqa" / "data" / "validation-00000-of-00001.parquet"
    content = bytearray(file.read_bytes())
    content[4:400] = bytes(396)
    file.write_bytes(content)
    with pytest.raises(
        MissingDataError,
        match="docvqa_val cannot be loaded: (?!.*Generation|.*data.root).*/docvqa; check that they are complete",
    ):
        sample_refs(docvqa(root), None)


def test_a_column_that_the_task_reads_and_the_data_lack_is_named(root):
    file = root / "docvqa" / "data" / "validation-00000-of-00001.parquet"
    write(file, [{"question": "what?", "ucsf_document_id": "d"}])
    with pytest.raises(MissingDataError, match="data of docvqa lack column answers, .*the data have question"):
        sample_refs(docvqa(root), None)


def test_a_column_that_saved_data_lack_is_named_too(root):
    import datasets

    data = datasets.Dataset.from_list([{"question": "what?", "answers": ["a"]}])
    datasets.DatasetDict({"validation": data}).save_to_disk(root / "saved")
    with pytest.raises(MissingDataError, match="lack columns image, ucsf_document_id"):
        sample_refs(docvqa(root, dataset_path=str(root / "saved")), None)


def test_files_of_one_split_with_other_columns_are_refused(root):
    write(root / "docvqa" / "data" / "validation-00001-of-00002.parquet", [PAGE | {"extra": 1}])
    with pytest.raises(MissingDataError, match="differ in columns extra"):
        sample_refs(docvqa(root), None)


def test_a_cluster_that_is_an_image_as_text_becomes_a_digest(tmp_path):
    import base64

    picture = base64.b64encode(bytes(300)).decode()
    row = dict.fromkeys("ABCD", "x") | {"index": 0, "question": "?", "answer": "A", "category": "single"}
    rows = [row | {"image": picture + end, "cycle_category": str(i)} for i, end in enumerate(["", "", "AAAA"])]
    write(tmp_path / "hrbench4k" / "data" / "hrbench_4k-00000-of-00001.parquet", rows, picture=None)
    refs = sample_refs(spec_from_config("hrbench4k", node("hrbench4k"), {"root": str(tmp_path)}), None)
    clusters = [ref.cluster for ref in refs]
    assert clusters[0] == clusters[1] != clusters[2] and all(len(cluster) == 16 for cluster in clusters)


# ---------------------------------------------------------------------- videos
CLIP = {"question": "what comes first?", "answer": "the start"}


@pytest.fixture
def films(tmp_path) -> Path:
    """A data.root with three questions of Video-ChatGPT about two videos, one of which is not there."""
    rows = [CLIP | {"video_name": name} for name in ("v_one", "v_one", "v_two")]
    write(tmp_path / "videochatgpt_temporal" / "data" / "test-00000-of-00001.parquet", rows, picture=None)
    videos = tmp_path / "videochatgpt_temporal" / "media" / "videochatgpt" / "Test_Videos"
    videos.mkdir(parents=True)
    (videos / "v_one.mkv").write_bytes(b"a video")
    return tmp_path


def films_spec(root: Path):
    name = "videochatgpt_temporal"
    return spec_from_config(name, node(name), {"root": str(root)})


@pytest.mark.parametrize("home", [None, "elsewhere"])
def test_videos_are_read_below_the_datasets_folder_and_a_missing_one_is_its_samples_error(films, monkeypatch, home):
    monkeypatch.delenv("HF_HOME", raising=False)
    if home:
        monkeypatch.setenv("HF_HOME", home)
    requests = ask_all(films_spec(films))
    folder = films / "videochatgpt_temporal" / "media" / "videochatgpt" / "Test_Videos"
    assert [request.videos for request in requests] == [[str(folder / "v_one.mkv")]] * 2 + [[]]
    assert requests[0].error is None and "v_two" in requests[2].error and "does not exist" in requests[2].error
    assert [request.cluster for request in requests] == ["v_one", "v_one", "v_two"]
    assert os.environ.get("HF_HOME") == home


def test_local_data_without_a_folder_of_videos_are_refused(films, monkeypatch, tmp_path):
    import shutil

    shutil.rmtree(films / "videochatgpt_temporal" / "media")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(MissingDataError, match="folder .*/home/videochatgpt.* of videochatgpt_temporal is missing"):
        sample_refs(films_spec(films), None)
    videos = tmp_path / "home" / "videochatgpt" / "Test_Videos"  # HF_HOME itself serves them, as upstream
    videos.mkdir(parents=True)
    (videos / "v_one.mp4").write_bytes(b"a video")
    assert ask_all(films_spec(films))[0].videos == [str(videos / "v_one.mp4")]


def test_the_home_of_a_task_is_set_for_as_long_as_it_runs_and_caches_stay_where_they_are(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("HF_DATASETS_CACHE", "/caches")
    before = dict(os.environ)
    with task_environment(str(tmp_path)):
        assert (os.environ["HF_HOME"], os.environ["HF_DATASETS_CACHE"]) == (str(tmp_path), "/caches")
    assert dict(os.environ) == before
    with task_environment(None):
        assert Path(os.environ["HF_HOME"]).is_absolute(), "some tasks read it without a default"
    assert dict(os.environ) == before


# ---------------------------------------------------------------------- fixtures
def test_every_fixture_is_of_a_dataset_and_made_once(monkeypatch, tmp_path):
    assert set(fixtures.names()) <= set(options("dataset"))
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path))
    made = fixtures.folder("ocrbench")
    stamp = made.stat().st_mtime_ns
    assert fixtures.folder("ocrbench") == made and made.stat().st_mtime_ns == stamp
    assert [path.name for path in (tmp_path / "fixtures").iterdir()] == [made.name], "nothing half-made is left"


def test_a_fixture_that_cannot_be_written_says_where(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(Exception, match="MMKV_BENCH_CACHE") as refused:
        fixtures.folder("ocrbench")
    assert type(refused.value).__name__ == "DataError"
