"""Calibration artefacts: what is refused with which sentence, and how they reach methods, cells and rows."""

from __future__ import annotations

import json

import pytest

from mmkv_bench.calibrate import artefact as module
from mmkv_bench.calibrate.artefact import METHODS, Artefact, Calibrations, committed, load, save
from mmkv_bench.config.files import conf_dir
from mmkv_bench.errors import CalibrationError, ConfigError
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.store.store import Store
from mmkv_bench.tiny import WEIGHTS
from tests.calibrate import synthetic
from tests.each import each
from tests.plan import setting

SCORES = synthetic.data("sparsemm", 3, 2)


def made(method: str = "sparsemm", fingerprint: str = "m0", **changes) -> Artefact:
    fields = {
        "method": method,
        "model": "mine",
        "model_fingerprint": fingerprint,
        "model_revision": None,
        "dataset": "pages",
        "samples": ["a", "b"],
        "settings": {"samples": 2},
        "versions": {"torch": "2.15.0"},
        "data": SCORES,
    }
    return Artefact.make(**(fields | changes))


@pytest.fixture
def file(tmp_path):
    return save(made(), tmp_path / "own.json")


def read(file, method="sparsemm", fingerprint="m0") -> Artefact:
    return load(method, str(file), "mine", fingerprint)


def test_what_is_saved_is_loaded(file):
    assert read(file) == made()
    assert read(file).data == SCORES
    assert json.loads(file.read_text())["checksum"] == made().checksum


def test_a_file_does_not_depend_on_when_and_where_it_was_written(tmp_path, file):
    assert save(made(), tmp_path / "elsewhere" / "other.json").read_bytes() == file.read_bytes()


@each("field", sorted(set(Artefact.__dataclass_fields__) - {"checksum", "format"}))
def test_the_checksum_covers_every_field(field):
    changed = {
        "model_revision": "abc",
        "samples": ["a"],
        "settings": {"samples": 3},
        "versions": {"torch": "2.16.0"},
        "data": {"scores": [[1.0]], "kv_heads": 1},
    }
    assert made(**{field: changed.get(field, "other")}).checksum != made().checksum


def test_numbers_are_rounded_so_that_float_noise_is_no_other_artefact():
    noisy = {"scores": [[score + 3e-8 for score in row] for row in SCORES["scores"]], "kv_heads": 2}
    assert made(data=noisy) == made()
    assert made(data={"scores": [[1e-5]], "kv_heads": 1}) != made(data={"scores": [[2e-5]], "kv_heads": 1})


def rewrite(file, change) -> None:
    fields = json.loads(file.read_text())
    change(fields)
    file.write_text(json.dumps(fields))


def test_a_file_that_was_only_formatted_anew_is_the_same(file):
    rewrite(file, lambda fields: None)
    assert read(file) == made()


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f["data"]["scores"][0].__setitem__(0, 99.0),
        lambda f: f["data"].__setitem__("more", 1),
        lambda f: f.__setitem__("model_fingerprint", "m1"),
        lambda f: f["samples"].append("c"),
        lambda f: f.__setitem__("checksum", "0" * 64),
    ],
)
def test_a_tampered_file_is_refused(file, change):
    rewrite(file, change)
    with pytest.raises(
        CalibrationError, match=r"own\.json was changed after it was written: the stored checksum is .* make it"
    ):
        read(file, fingerprint="m1")


@pytest.mark.parametrize(
    "change",
    [
        lambda f: f.pop("settings"),
        lambda f: f.__setitem__("more", 1),
        lambda f: f.__setitem__("data", [1, 2]),
    ],
)
def test_a_file_of_another_kind_is_refused(file, change):
    rewrite(file, change)
    with pytest.raises(CalibrationError, match="is not a calibration artefact"):
        read(file)


def test_another_format_is_refused(file):
    rewrite(file, lambda fields: fields.__setitem__("format", 7))
    with pytest.raises(CalibrationError, match="has format 7, but this version reads 1"):
        read(file)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"auto"', "nonsense"])
def test_what_is_no_json_object_is_refused(file, text):
    file.write_text(text)
    with pytest.raises(CalibrationError, match="cannot be read as JSON|is not a calibration artefact"):
        read(file)


def test_a_pickle_is_refused_unread(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('unpickled')",))

    file = tmp_path / "own.json"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CalibrationError, match="cannot be read as JSON"):
        read(file)


def test_the_weights_of_another_model_are_refused(file):
    with pytest.raises(
        CalibrationError, match=r"was made for model mine \(m0\), but this run's model is mine \(m9\).*sparsemm"
    ):
        read(file, fingerprint="m9")


def test_the_calibration_of_another_method_is_refused(file):
    with pytest.raises(CalibrationError, match="is a calibration of sparsemm, not of prefixkv"):
        read(file, method="prefixkv")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(
        CalibrationError, match=r"calibration=.*gone\.json does not exist .* python -m mmkv_bench calibrate"
    ):
        read(tmp_path / "gone.json")
    message = (
        r"model mine has no committed calibration for sparsemm \(no file conf/calibration/mine/sparsemm.json\); make"
    )
    with pytest.raises(CalibrationError, match=message):
        load("sparsemm", "auto", "mine", "m0")


def test_the_command_that_a_refusal_names_measures_the_model_of_the_run(tmp_path):
    for name, words in (("tiny", "sparsemm"), ("mine", "sparsemm --path <model.path> --name mine")):
        with pytest.raises(CalibrationError) as refusal:
            load("sparsemm", str(tmp_path / "gone.json"), name, "m0")
        assert str(refusal.value).endswith(f"python -m mmkv_bench calibrate {words}")


@each("name", ["../tiny", "a/b", "", "/tmp", ".hidden"])
def test_a_model_name_leads_nowhere_else(name):
    with pytest.raises(CalibrationError, match="is not a plain name"):
        committed("sparsemm", name)


@each("spec", [None, "", 3, ["auto"]])
def test_a_spec_is_auto_or_a_path(spec):
    with pytest.raises(CalibrationError, match="is not valid; allowed: auto"):
        load("sparsemm", spec, "mine", "m0")


def test_an_unknown_method_is_refused():
    with pytest.raises(CalibrationError, match="did you mean 'prefixkv'"):
        load("prefixk", "auto", "tiny", "m0")


# ---------------------------------------------------------------- the committed ones


@each("method", METHODS)
def test_the_embedded_models_artefacts_are_committed_and_valid(method):
    """Fails when the embedded model was trained anew: then run the commands of docs/calibration.md again."""
    artefact = load(method, "auto", "tiny", folder_fingerprint(WEIGHTS))
    assert artefact.model == "tiny" and artefact.samples and not any("test" in sample for sample in artefact.samples)
    assert len(set(artefact.samples)) == len(artefact.samples)


def test_every_committed_file_belongs_to_a_method():
    found = {path.stem for path in (conf_dir() / "calibration").rglob("*") if path.is_file()}
    assert found == set(METHODS)


# ---------------------------------------------------------------- parts, cells and rows


def cells(*overrides, **facts):
    return setting.cells("method=sparsemm", "baseline=none", *overrides, facts_=setting.facts(**facts))


def test_a_part_gets_the_data_and_its_cell_the_checksum_and_no_path(file):
    (cell,) = cells(f"methods.sparsemm.calibration={file}")
    assert cell.compressor.allocator.calibration == SCORES
    assert json.loads(cell.parameters)["calibration"] == {"sparsemm": made().checksum[:16]}
    assert str(file) not in str(cell.row())


def test_the_same_content_elsewhere_is_the_same_cell_and_other_content_another(file, tmp_path):
    copy = save(made(), tmp_path / "copy.json")
    other = save(made(data=synthetic.data("sparsemm", 4, 2)), tmp_path / "other.json")
    hashes = [cells(f"methods.sparsemm.calibration={one}")[0].cell for one in (file, copy, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_path_of_ones_own_counts_as_tuned(file):
    assert cells(f"methods.sparsemm.calibration={file}")[0].tuned


def test_a_run_without_an_artefact_is_refused_before_any_work():
    with pytest.raises(CalibrationError, match="model hf has no committed calibration for sparsemm"):
        cells()


def test_a_foreign_artefact_is_refused_when_the_run_is_planned(file):
    with pytest.raises(CalibrationError, match=r"was made for model mine \(m0\), but this run's model is hf \(m7\)"):
        cells(f"methods.sparsemm.calibration={file}", model_fingerprint="m7")


def test_methods_that_read_no_calibration_ask_for_none():
    (cell,) = cells("methods.sparsemm.scores=uniform")
    assert cell.compressor.allocator.scores == "uniform"
    (other,) = setting.cells("method=snapkv", "baseline=none")
    assert "calibration" not in json.loads(other.parameters)


def test_two_methods_of_a_run_share_one_artefact_and_each_says_so(file):
    made_cells = setting.cells(
        "method=[sparsemm,mmshift_sparsemm,snapkv]",
        "baseline=none",
        f"methods.sparsemm.calibration={file}",
        f"methods.mmshift_sparsemm.calibration={file}",
    )
    told = {cell.method: json.loads(cell.parameters).get("calibration") for cell in made_cells}
    used = {"sparsemm": made().checksum[:16]}
    assert told == {"sparsemm": used, "mmshift_sparsemm": used, "snapkv": None}
    seen = {"calibrations": {used["sparsemm"]: {"dataset": made().dataset, "samples": len(made().samples)}}}
    assert {cell.method: cell.config_additions() for cell in made_cells} == {
        "sparsemm": seen,
        "mmshift_sparsemm": seen,
        "snapkv": {},
    }


def test_a_row_says_what_its_calibration_was_made_of(file, tmp_path):
    """Tables find the words of a committed artefact by its checksum; those of one's own stand in the rows alone."""
    from mmkv_bench.config.compose import compose
    from mmkv_bench.plan.cells import stored_rows
    from mmkv_bench.plan.plan import Plan

    words = ("method=[sparsemm,snapkv]", "baseline=none", f"methods.sparsemm.calibration={file}")
    config, store = compose([*setting.MODEL, *words]), Store(tmp_path / "rows")
    plan = Plan.of(config, (), setting.cells(*words), parts=(), notes=(), family=None)
    store.write_cells(stored_rows(plan.cells, plan.resolved, plan.provenance))
    told = {row["method"]: json.loads(row["config"]).get("calibrations") for row in store.cells().to_pylist()}
    assert told == {"sparsemm": {made().checksum[:16]: {"dataset": "pages", "samples": 2}}, "snapkv": None}


def test_a_part_that_does_not_say_what_it_takes_is_refused(monkeypatch):
    from mmkv_bench.compression.allocators.head_scores import HeadScores

    monkeypatch.delattr(HeadScores, "calibrated_by")
    with pytest.raises(ConfigError, match="HeadScores does not say which calibration it takes"):
        cells()


def test_artefacts_are_read_once_and_handed_out_as_copies(file, monkeypatch):
    calibrations, reads = Calibrations("mine", "m0"), []
    monkeypatch.setattr(module, "load", lambda *given: reads.append(given) or load(*given))
    first = calibrations.data("sparsemm", str(file))
    first["scores"][0][0] = -1
    assert calibrations.data("sparsemm", str(file)) == SCORES and len(reads) == 1
    assert calibrations.taken() == {"sparsemm": made().checksum[:16]} and calibrations.taken() == {}


def test_the_command_line_says_it_in_one_sentence(capsys, tmp_path):
    from mmkv_bench.cli.main import main

    code = main(["method=sparsemm", "model.name=nobody", "limit=1", f"out={tmp_path / 'rows'}"])
    told = capsys.readouterr()
    assert code == 2 and "model nobody has no committed calibration for sparsemm" in told.err
    assert "Traceback" not in told.err
