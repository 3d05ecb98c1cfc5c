"""Calibration on samples of a dataset, and of files that the papers' authors released."""

from __future__ import annotations

import hashlib
import json
from statistics import fmean

import pytest

from mmkv_bench.calibrate.artefact import load
from mmkv_bench.calibrate.command import imported_artefact, measured
from mmkv_bench.cli.grammar import reader
from mmkv_bench.cli.verbs.measure import with_defaults
from mmkv_bench.compression.allocators.head_scores import HeadScores
from mmkv_bench.compression.allocators.prefix import Prefix
from mmkv_bench.diagnostics.dataset_samples import of_dataset
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.tiny import WEIGHTS
from tests.cli.setting import verb
from tests.each import each

main = verb("calibrate")
DEV = ("dataset=pages_lookup", "dataset.split=dev")


def options(*words: str):
    return with_defaults(reader("calibrate")[1].read(words))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A small dataset of one's own in MM-Vet's schema: pages, whose answers are known."""
    from datasets import Dataset, Features, Image, Value

    from mmkv_bench.calibrate.samples import page

    root = tmp_path_factory.mktemp("data")
    (root / "mmvet" / "data").mkdir(parents=True)
    names = ("question_id", "image", "question", "answer", "image_source", "capability")
    features = Features({name: Image() if name == "image" else Value("string") for name in names})
    rows = []
    for number in range(4):
        one = page("lookup", "small", "train", number)
        question = one.messages[0]["content"][-1]["text"] * (1 + 19 * (number == 2))
        rows.append(dict(zip(names, (str(number), one.images[0], question, one.answer, "", ""), strict=True)))
    Dataset.from_list(rows, features).to_parquet(str(root / "mmvet" / "data" / "test-00000-of-00001.parquet"))
    return ("dataset=mmvet_prefixkv", f"data.root={root}")


@pytest.mark.full
def test_samples_of_a_dataset_give_what_the_same_pages_give():
    words = ("--samples", "2")
    ours = measured(options("prefixkv", "--kinds", "lookup", "--split", "dev", *words))
    theirs = measured(options("prefixkv", *words, *DEV), of_dataset(DEV, 2))
    assert theirs.data == ours.data and len(theirs.samples) == 2
    assert theirs.dataset == "the first 2 samples of pages_lookup_small_dev (task pages_lookup_small)"
    assert theirs.settings["dataset_fingerprint"] and theirs.settings["samples"] == 2
    assert theirs.checksum != ours.checksum


@pytest.mark.full
def test_a_local_dataset_is_read_by_order_by_chance_and_by_length(own):
    first = measured(options("hybridkv", "--samples", "2", *own), of_dataset(own, 2))
    drawn = [
        measured(options("hybridkv", "--samples", "2", *own), of_dataset(own, 2, draw)) for draw in (0, 0, 1, 2, 3)
    ]
    long = measured(options("mmshift", "--samples", "1", *own), of_dataset(own, 1, instruction="20:"))
    ids = [f"mmvet_prefixkv/{number}" for number in range(4)] if "/" in first.samples[0] else first.samples
    assert first.samples == ids[:2]
    assert drawn[0] == drawn[1] and len({tuple(made.samples) for made in drawn}) > 1
    assert all(made.samples == sorted(made.samples) for made in drawn)
    assert len(long.samples) == 1 and long.samples[0].endswith("2") and "more than 20 tokens" in long.dataset
    assert long.settings["instruction"] == "20:" and all(long.data["std_answer"])


@each(
    ("words", "message"),
    [
        (["prefixkv", "dataset=pages_lookup"], "has test pages, on which no method may be calibrated"),
        (["prefixkv", "model=tiny"], "model=tiny is not a setting of the samples"),
        (["prefixkv", "dataset=pages_lookup", "--kinds", "lookup"], "--kinds does not work with samples of a dataset"),
        (["prefixkv", "--draw", "1"], "--draw chooses among samples of a dataset; name one with dataset=<name>"),
        (["sparsemm", *DEV], "sparsemm needs the position of each answer character"),
        (["prefixkv", "dataset=[pages_lookup,pages_walk]"], "only one dataset can be measured at a time"),
        (["prefixkv", *DEV, "--samples", "501"], "has 500 samples, fewer than the 501 asked for"),
        (["prefixkv", *DEV, "--instruction", "9"], "--instruction 9 is not a range of tokens"),
        (["prefixkv", *DEV, "--import", "a.json"], "--import measures nothing"),
        (["hybridkv", "--import", "a.json"], "there are no released calibrations of hybridkv to import"),
        (["prefixkv", "--import", "a_0.9.json"], "a_0.9.json cannot be read"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(words, message, capsys, tmp_path):
    assert main([*words, "--out", str(tmp_path / "no.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no.json").exists()


# ---------------------------------------------------------------- released files

LAYERS, HEADS, KV_HEADS = 4, 4, 2  # of the embedded model


def written(folder, name: str, content) -> str:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder / name)


def test_released_prefix_files_become_a_profile(tmp_path):
    evicted = {"0.9": [0.8, 0.9, 0.95, 0.94], "0.5": [0.1234567891, 0.6, 0.7, 0.5765432109]}
    files = [written(tmp_path, f"prefixkv_some-7b_{name}.json", rows) for name, rows in evicted.items()]
    assert main(["prefixkv", "--import", *files, "--out", str(tmp_path / "made.json")]) == 0
    made = load("prefixkv", str(tmp_path / "made.json"), "tiny", folder_fingerprint(WEIGHTS))
    assert made.data["grid"] == [0.1, 0.5] and made.samples == []
    for rho, name in ((0, "0.9"), (1, "0.5")):
        assert made.data["ratios"][rho] == [1 - share for share in evicted[name]]  # to the last digit
    assert made.settings["imported"] == {
        f"prefixkv_some-7b_{name}.json": hashlib.sha256(
            (tmp_path / f"prefixkv_some-7b_{name}.json").read_bytes()
        ).hexdigest()
        for name in evicted
    }
    said = " ".join(made.settings["oddities"])
    assert "prefixkv_some-7b_0.9.json keeps 0.102500 on average where its name says 0.1" in said
    assert "0.5.json keeps" not in said and "no file for the budgets 0.2, 0.3, 0.4, 0.6" in said
    caps = Prefix(calibration=made.data, rounding="nearest")._counts_from_profile(100, 1000, LAYERS)
    assert caps == [200, 100, 50, 60]


def test_released_head_scores_are_means_of_their_samples(tmp_path):
    found = {f"{layer}-{head}": [layer * 1.0, head * 0.5] for layer in range(LAYERS) for head in range(HEADS)}
    file = written(tmp_path, "some.json", dict(reversed(found.items())))
    assert main(["sparsemm", "--import", file, "--out", str(tmp_path / "made.json")]) == 0
    made = load("sparsemm", str(tmp_path / "made.json"), "tiny", folder_fingerprint(WEIGHTS))
    assert made.data["kv_heads"] == KV_HEADS
    assert made.data["scores"] == [[fmean(found[f"{i}-{j}"]) for j in range(HEADS)] for i in range(LAYERS)]
    assert "2 samples of each head" in made.settings["oddities"] and "1 of 16 heads have the score 0" in str(
        made.settings
    )
    HeadScores(calibration=made.data)


@each(
    ("method", "name", "content", "message"),
    [
        ("prefixkv", "a_0.9.json", [0.9, 0.9], "has 2 layers, but the model has 4"),
        ("prefixkv", "a.json", [0.9] * 4, "does not end with the evicted share"),
        ("prefixkv", "a_0.9.json", [0.9, 0.9, 0.9, 1.5], "has '1.5'; allowed: finite numbers, 0 to 1"),
        ("prefixkv", "a_0.9.json", "[0.9, 0.9, 0.9, NaN]", "has 'nan'; allowed: finite numbers"),
        ("prefixkv", "a_0.9.json", [0.9, 0.9, 0.9, True], "has 'True'"),
        ("prefixkv", "a_0.9.json", "[" * 100_000, "cannot be read as JSON"),
        ("sparsemm", "a.json", {"0-0": [1.0]}, "has scores of 1 heads, but the model has 4 layers of 4 heads"),
        ("sparsemm", "a.json", '{"0-0": [1], "0-0": [2]}', "a key occurs twice"),
        ("sparsemm", "a.json", [1], "is not a JSON object of heads"),
    ],
)
def test_files_of_another_model_and_damaged_ones_are_refused(method, name, content, message, capsys, tmp_path):
    file = written(tmp_path, name, content)
    assert main([method, "--import", file, "--out", str(tmp_path / "no.json")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "no.json").exists()


def test_a_pickle_is_refused_unread(tmp_path, capsys):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('unpickled')",))

    (tmp_path / "a.json").write_bytes(pickle.dumps(Bomb()))
    assert main(["sparsemm", "--import", str(tmp_path / "a.json"), "--out", str(tmp_path / "no.json")]) == 2
    assert "cannot be read as JSON" in capsys.readouterr().err


def test_an_import_names_the_model_that_it_is_said_to_be_of(tmp_path):
    file = written(tmp_path, "a_0.5.json", [0.5] * LAYERS)
    made = imported_artefact(options("prefixkv", "--import", file))
    assert (made.model, made.model_fingerprint) == ("tiny", folder_fingerprint(WEIGHTS))
    assert made.dataset == "released file a_0.5.json, imported" and "name no weights" in made.settings["oddities"][0]
