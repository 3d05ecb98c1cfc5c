"""`--text`: PrefixKV's shares of a model that reads no images, measured on passages of a text."""

from __future__ import annotations

from fractions import Fraction
from statistics import fmean

import pytest
import torch

from mmkv_bench.calibrate.artefact import load
from mmkv_bench.generation.encode import encode
from mmkv_bench.models.files import folder_fingerprint
from mmkv_bench.models.source import Source
from tests.calibrate.test_commands import naive_shares
from tests.cli.setting import verb
from tests.families.shapes import small

main = verb("calibrate")

TEXT = " ".join(f"On day {number} nobody came." for number in range(40))  # the tokenizer has a token per byte


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    made = Source.of(small("llama_3_8b", layers=3)).load()
    made.model.save_pretrained(folder)
    made.processor.save_pretrained(folder)
    return made, folder


def command(folder, *words: str) -> list[str]:
    return ["prefixkv", "--path", str(folder), "--name", "mine", "--dtype", "float32", *words]


@pytest.mark.full
def test_shares_are_those_of_the_attention_that_passages_get(saved, tmp_path, capsys):
    made, folder = saved
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "b.txt").write_text(TEXT[300:])
    (tmp_path / "text" / "a.txt").write_text(TEXT[:300])
    file = tmp_path / "artefact.json"
    words = ["--text", str(tmp_path / "text"), "--tokens", "120", "--samples", "3", "--out", str(file)]
    assert main(command(folder, *words)) == 0, capsys.readouterr().err
    artefact = load("prefixkv", str(file), "mine", folder_fingerprint(folder))
    assert artefact.samples == ["text-000000", "text-000001", "text-000002"]
    assert artefact.dataset.startswith("passages of 120 tokens") and str(tmp_path) not in file.read_text()

    whole, shares = TEXT[:300] + "\n" + TEXT[300:], []
    made.model.set_attn_implementation("eager")
    for start in (0, 120, 240):
        message = [{"role": "user", "content": [{"type": "text", "text": whole[start : start + 120]}]}]
        prompt = encode(made.processor, made.family, "x", message)
        with torch.no_grad():
            attentions = made.model(**prompt.inputs, output_attentions=True, use_cache=False).attentions
        importance = [layer[0].double().sum((0, 1)).tolist() for layer in attentions]
        shares.append([naive_shares(importance, Fraction(i + 1, 100)) for i in range(100)])
    for i, ratios in enumerate(artefact.data["ratios"]):
        want = [fmean(layer) for layer in zip(*(sample[i] for sample in shares), strict=True)]
        # float32 sums may order near ties otherwise and so move a prefix by an entry
        assert ratios == pytest.approx(want, abs=2 / prompt.length), f"at {artefact.data['grid'][i]}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "{here}"], "has no text; give a text file, or a folder with *.txt files"),
        (["--text", "{here}/none.txt"], "has no text"),
        (["--text", "{file}", "--tokens", "600"], "tokens, but 10 passages of 600 need 6000; give more text"),
        (["--text", "{file}", "--tokens", "0"], "samples=10 and tokens=0 must both be 1 or more"),
        (["--text", "{file}", "--kinds", "lookup"], "--text replaces pages; give only one"),
        ([], "reads no images, but pages are images; give --text"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(saved, tmp_path, capsys, words, message):
    file = tmp_path / "some.text"
    file.write_text(TEXT)
    words = [word.format(here=tmp_path, file=file) for word in words]
    assert main(command(saved[1], *words, "--out", str(tmp_path / "none.json"))) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_other_methods_ask_for_a_model_with_images(saved, tmp_path, capsys):
    words = ["hybridkv", "--path", str(saved[1]), "--name", "mine", "--out", str(tmp_path / "none.json")]
    assert main(words) == 2
    assert "pages are images; choose a multimodal model" in capsys.readouterr().err
