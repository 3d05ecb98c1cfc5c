"""LoRA adapters: added into the weights, part of the model's fingerprint, refused where they are of something else."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mmkv_bench.errors import ConfigError
from mmkv_bench.models.source import Source
from mmkv_bench.tiny import WEIGHTS
from tests.families.shapes import node


def trained(path, rank=2, targets=("q_proj", "v_proj")):
    """A folder with an adapter of the embedded model whose products are not zero, as PEFT writes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_pretrained(WEIGHTS, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=4, target_modules=list(targets)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    model.save_pretrained(path)
    return model.eval()


def of(folder) -> Source:
    return Source.of(node("tiny", adapter=str(folder)))


@pytest.mark.slow
def test_a_merged_adapter_computes_what_peft_computes_and_leaves_the_layers_as_they_were(tmp_path):
    beside = trained(tmp_path / "lora")
    loaded, plain = of(tmp_path / "lora").load(), Source.of(node("tiny")).load()
    ids = torch.randint(5, 40, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, expected, without = (model(input_ids=ids).logits for model in (loaded.model, beside, plain.model))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert (logits - without).abs().max() > 0.1
    names = [{name: type(module) for name, module in one.model.named_modules()} for one in (loaded, plain)]
    assert names[0] == names[1]


def test_an_adapter_is_part_of_the_model_by_content(tmp_path):
    trained(tmp_path / "lora")
    shutil.copytree(tmp_path / "lora", tmp_path / "copy")
    prints = [of(tmp_path / name).fingerprint() for name in ("lora", "copy")]
    assert prints[0] == prints[1] != Source.of(node("tiny")).fingerprint()
    assert {file.name for file in of(tmp_path / "lora").files()} >= {"adapter_model.safetensors", "model.safetensors"}
    config = json.loads((tmp_path / "copy" / "adapter_config.json").read_text())
    (tmp_path / "copy" / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    assert of(tmp_path / "copy").fingerprint() != prints[0]
    with pytest.raises(ConfigError, match="changed while this run"):
        of(tmp_path / "copy").confirm(prints[0][0])


def test_what_is_no_adapter_of_the_model_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json and no adapter_model\.safetensors; give"):
        of(tmp_path / "empty").fingerprint()
    trained(tmp_path / "pickled")
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; give the folder that PEFT"):
        of(tmp_path / "pickled").load()
    trained(tmp_path / "other")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(ConfigError, match=r"does not fit this model \(.*\); give an adapter trained"):
        of(tmp_path / "other").load()
    with pytest.raises(ConfigError, match="needs trained weights, but model.weights=random; leave out"):
        Source.of(node("smolvlm_256m", adapter=str(tmp_path / "other"), weights="random"))
