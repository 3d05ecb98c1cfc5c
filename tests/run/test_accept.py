"""Promise: a bundle of an experiment is accepted as it was made, and refused by the right check where it was changed."""

from __future__ import annotations

import hashlib
import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from mmkv_bench import tiny
from mmkv_bench.store.parts import parquet_bytes
from mmkv_bench.store.publish import BESIDE, ENVIRONMENT, MANIFEST, RECEIPT, TABLES
from tests.cli.setting import verb
from tests.each import each
from tests.run.setting import done

SETTINGS = ("experiment=first_real", "model=tiny", "dataset=pages", "method=[full,snapkv]", "budget=[16]", "limit=4")
CHECKS = ("files", "code", "model", "cells", "samples", "prompts", "budgets", "scores", "tables", "receipt", "answers")


def bundle_of(folder, *settings):
    """A bundle of a run with these settings, made as `make first-real` makes one."""
    rows, receipt = folder / "rows", folder / "receipt.json"
    done(rows, *settings)
    assert verb("verify")([str(rows), "--all", "--receipt", str(receipt)]) in (0, 2)  # 2: a folder's place is in no row
    assert verb("pack")([str(rows), "--publish", str(folder / "bundle"), "--receipt", str(receipt)]) == 0
    return folder / "bundle"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_of(tmp_path_factory.mktemp("accept"), *SETTINGS)


def accepted(capsys, bundle, *words, code=0):
    """Outcome and text of each check of a bundle."""
    capsys.readouterr()
    settings = () if any(word.startswith("experiment=") for word in words) else SETTINGS
    assert verb("accept")([str(bundle), *settings, *words, "--json"]) == code, capsys.readouterr()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["accepted"] == (code == 0)
    return {one["check"]: (one["outcome"], one["text"]) for one in document["checks"]}


def repair(bundle):
    """Make the manifest say what the files are."""
    manifest = json.loads((bundle / MANIFEST).read_text())
    for entry in manifest["files"]:
        data = (bundle / entry["path"].replace("/", "-")).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / MANIFEST).write_text(json.dumps(manifest))


def rewrite(bundle, table, change):
    """Change a table of a bundle and repair all checksums."""
    (file,) = bundle.glob(f"{table}-*")
    rows = pq.read_table(file)
    changed = change([dict(row) for row in rows.to_pylist()])
    file.write_bytes(parquet_bytes(pa.Table.from_pylist(changed, rows.schema.remove_metadata())))
    repair(bundle)


def of_first_snapkv(**values):
    """A change of the first answer under a budget."""

    def change(rows):
        row = next(row for row in rows if row["budget_entries"] is not None)
        return [{**one, **{name: make(one) for name, make in values.items()}} if one is row else one for one in rows]

    return lambda bundle: rewrite(bundle, "responses", change)


def better_score(bundle):
    """A score of 1 for the first answer that has 0."""

    def change(rows):
        row = next(row for row in rows if row["metric"] == "exact_match" and row["value"] == 0)
        return [{**one, "value": 1.0} if one is row else one for one in rows]

    rewrite(bundle, "samples", change)


def edit(name, change):
    """A change of a file beside the rows."""

    def edited(bundle):
        (bundle / name).write_text(change((bundle / name).read_text()))
        repair(bundle)

    return edited


def other_code(text):
    document = json.loads(text)
    document["source"]["compression/scorers/window.py"] = "0" * 64
    return json.dumps(document)


def flip(bundle):
    (file,) = bundle.glob("responses-*")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
def test_a_bundle_is_accepted_as_it_was_made_and_its_lines_say_what_was_checked(bundle, capsys):
    checks = accepted(capsys, bundle, "--samples", "20")
    assert {name: outcome for name, (outcome, _) in checks.items()} == dict.fromkeys(CHECKS, "ok")
    assert "8 answers, none missing" in checks["samples"][1] and "4 prompts" in checks["prompts"][1]
    assert checks["answers"][1].startswith("8 made again, 8 equal") and "8 of them equal" in checks["receipt"][1]
    assert verb("accept")([str(bundle), *SETTINGS, "--samples", "1", "--seed", "3"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:-1]] == [*CHECKS] and out[-1] == "accepted: nothing is refused"
    assert "--seed 3 draws the same" in out[-2] and str(bundle) in out[0]


TAMPERED = {
    "a byte": (flip, {"files": "has sha256"}),
    "a row": (of_first_snapkv(answer=lambda row: "zebra"), {"scores": "to other answers", "tables": "line", "receipt": "other"}),
    "tokens": (of_first_snapkv(token_ids=lambda row: [*row["token_ids"], 5]), {"answers": "another token_ids"}),
    "a lost row": (
        lambda bundle: rewrite(bundle, "responses", lambda rows: rows[:-1]),
        {"samples": "1 of 8 answers of tiny to pages_small are missing", "scores": "", "tables": "", "receipt": ""},
    ),
    "a score": (better_score, {"scores": "is 1.0, made again 0.0", "tables": "", "receipt": "other scores"}),
    "a prompt": (of_first_snapkv(prompt_hash=lambda row: "0" * 16), {"prompts": "to other prompts", "answers": "prompt_hash"}),
    "entries": (of_first_snapkv(entries_resident=lambda row: 129), {"budgets": "129 entries for 128 asked", "tables": "line"}),
    "a number": (edit(TABLES, lambda text: text.replace("[0.", "[0.0", 1)), {"tables": "line"}),
    "code": (edit(ENVIRONMENT, other_code), {"code": "compression/scorers/window.py: 1 files of the package"}),
    "a receipt": (edit(RECEIPT, lambda text: text.replace('"answers_digest": "', '"answers_digest": "0')), {"receipt": "other"}),
    "no list": (edit(ENVIRONMENT, lambda text: "[]"), {"code": "does not list the package's files"}),
}  # fmt: skip


@pytest.mark.slow
@each("name", [*TAMPERED], keep=5)
def test_what_was_changed_is_refused_with_its_reason(bundle, tmp_path, capsys, name):
    tamper, reasons = TAMPERED[name]
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    tamper(copy)
    checks = accepted(capsys, copy, "--samples", "8" if "answers" in reasons else "0", code=1)
    refused = {check: text for check, (outcome, text) in checks.items() if outcome == "refused"}
    assert {*refused} == {*reasons}, refused
    assert all(reason in refused[check] for check, reason in reasons.items()), refused
    assert str(tmp_path / "bundle") in refused["files"] if name == "a byte" else "/tmp/tmp" not in str(refused)


@pytest.mark.slow
def test_another_model_and_another_experiment_are_refused(bundle, tmp_path, capsys):
    other = shutil.copytree(next(iter(tiny.__path__)) + "/weights", tmp_path / "weights")
    file = other / "model.safetensors"
    weights = load_file(file)
    name = max(weights, key=lambda key: weights[key].numel())
    weights[name] = weights[name] * 1.5
    save_file(weights, file, metadata={"format": "pt"})
    made = bundle_of(tmp_path, *SETTINGS, f"model.path={other}")
    checks = accepted(capsys, made, "--samples", "0", code=1)
    refused = {check: text for check, (outcome, text) in checks.items() if outcome == "refused"}
    assert {*refused} == {"model"} and "those of the experiment" in refused["model"]

    experiments = {
        ("limit=6",): {"samples": "4 of 12 answers"},
        ("methods.snapkv.window=4",): {"cells": "parameters"},
        ("budget=[16,32]",): {"cells": "snapkv@32 on pages_small: not in the bundle"},
        ("model=smolvlm_256m",): {
            "model": "no answers of smolvlm_256m; the bundle has answers of: tiny",
            "cells": "not in",
        },
    }
    for words, reasons in experiments.items():
        settings = {word.partition("=")[0]: word for word in (*SETTINGS, *words)}.values()
        checks = accepted(capsys, bundle, *settings, "--samples", "0", code=1)
        refused = {check: text for check, (outcome, text) in checks.items() if outcome == "refused"}
        assert {*refused} == {*reasons} and all(text in refused[check] for check, text in reasons.items()), refused


@pytest.mark.slow
def test_what_is_no_bundle_is_answered_in_a_sentence(bundle, tmp_path, capsys):
    assert verb("accept")([str(tmp_path / "nowhere")]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert verb("pack")([str(bundle.parent / "rows"), "--receipt", str(bundle.parent / "receipt.json")]) == 2
    assert "add --publish <folder>" in capsys.readouterr().err
    plain = shutil.copytree(bundle, tmp_path / "plain")
    manifest = json.loads((plain / MANIFEST).read_text())
    manifest["files"] = [entry for entry in manifest["files"] if entry["path"] not in BESIDE]
    (plain / MANIFEST).write_text(json.dumps(manifest))
    checks = accepted(capsys, plain, "--samples", "0")
    assert checks["tables"][0] == checks["receipt"][0] == "not checked" and checks["code"][0] == "ok"
