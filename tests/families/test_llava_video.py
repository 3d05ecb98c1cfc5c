"""LLaVA-Video: frames as its released code makes them, and checkpoints of its layout rewritten for our classes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmkv_bench.errors import ConfigError
from mmkv_bench.families.classes.llava_video import LlavaVideoForConditionalGeneration, pool_frames
from mmkv_bench.families.tiles import video_token_count
from mmkv_bench.models import random_weights
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import config_of, plain
from mmkv_bench.models.source import Source
from tests.each import each
from tests.families.shapes import node, small
from tools.llava_video_weights import main, new_name, rewrite

NAME = "llava_video_7b"


def frames_of_the_paper(features, newline, pooling):
    """Row by row, feature by feature, in float64."""
    rows_out = []
    for frame in features.double():
        side = int(len(frame) ** 0.5)
        grid = frame.view(side, side, -1)
        rows = side // 2 if pooling == "average" else -(-side // 2)
        for i in range(rows):
            for j in range(rows):
                if pooling == "average":
                    rows_out.append(sum(grid[2 * i + a, 2 * j + b] for a in (0, 1) for b in (0, 1)) / 4)
                else:  # half-pixel centres, as images are resampled
                    y, x = ((k + 0.5) * side / rows - 0.5 for k in (i, j))
                    y0, x0 = int(max(y, 0)), int(max(x, 0))
                    y1, x1 = min(y0 + 1, side - 1), min(x0 + 1, side - 1)
                    dy, dx = max(y, 0) - y0, max(x, 0) - x0
                    top = grid[y0, x0] * (1 - dx) + grid[y0, x1] * dx
                    rows_out.append(top * (1 - dy) + (grid[y1, x0] * (1 - dx) + grid[y1, x1] * dx) * dy)
            rows_out.append(newline.double())
    return torch.stack(rows_out)


@each("pooling", ["average", "bilinear"])
@each("side", [2, 4, 5, 27])
def test_every_row_of_every_frame_is_pooled_and_ends_with_a_newline(pooling, side):
    generator = torch.Generator().manual_seed(side)
    features, newline = torch.randn(3, side * side, 8, generator=generator), torch.randn(8, generator=generator)
    found = pool_frames(features, newline, pooling)
    assert found.shape[0] * found.shape[1] == video_token_count(3, side, pooling)
    torch.testing.assert_close(
        found.flatten(0, 1).double(), frames_of_the_paper(features, newline, pooling), atol=1e-5, rtol=0
    )


def test_counts_are_those_of_the_checkpoint():
    assert video_token_count(32, 27, "average") == 32 * 182
    assert video_token_count(64, 27, "bilinear") == 64 * 210


@pytest.fixture(scope="module")
def parts():
    model = small(NAME)
    model.shape["vision_config"]["num_hidden_layers"] = 2
    config = config_of(model.shape)
    built = random_weights.build(config, dtype=torch.float32, device=torch.device("cpu"))
    return model, config, built, build_processor(config, model.processor)


@pytest.mark.full
def test_a_video_fills_its_placeholders_with_its_frames(parts):
    _, config, model, processor = parts
    assert isinstance(model, LlavaVideoForConditionalGeneration)
    frames = torch.randint(
        0, 256, (3, 60, 80, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    ).numpy()
    inputs = processor(text=["<video>\nwhat happens?"], videos=[frames], return_tensors="pt", do_sample_frames=False)
    at = inputs["input_ids"][0] == config.video_token_id
    assert int(at.sum()) == 3 * 210
    layer = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    with torch.no_grad():
        tower = model.model.vision_tower(inputs["pixel_values_videos"][0], output_hidden_states=True)
        projected = model.model.multi_modal_projector(tower.hidden_states[-1])
        expected = frames_of_the_paper(projected, model.model.image_newline, "bilinear").float()
        found = model.model.get_video_features(
            inputs["pixel_values_videos"], **layer, output_hidden_states=True
        ).pooler_output
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        embedded[0, at] = expected
        logits = model(**inputs).logits
        by_hand = model(inputs_embeds=embedded).logits
    torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, by_hand, atol=2e-4, rtol=1e-3)


# ---------------------------------------------------------------------- published layout
THEIRS = {  # our name -> theirs, prefix by prefix: the other way round than the code under test
    "model.vision_tower.": "model.vision_tower.vision_tower.vision_model.",
    "model.multi_modal_projector.linear_1.": "model.mm_projector.0.",
    "model.multi_modal_projector.linear_2.": "model.mm_projector.2.",
    "model.image_newline": "model.image_newline",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}


def their_name(name: str) -> str:
    prefix = next(p for p in THEIRS if name.startswith(p))
    return THEIRS[prefix] + name.removeprefix(prefix)


@pytest.fixture(scope="module")
def published(parts, tmp_path_factory):
    """A folder of the published layout: their config.json, weights in two files, a Qwen2 tokenizer without placeholders."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model, config, built, _ = parts
    folder = tmp_path_factory.mktemp("published")
    text = config.text_config
    theirs = {key: getattr(text, key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
              "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")}  # fmt: skip
    theirs |= {
        "architectures": ["LlavaQwenForCausalLM"],
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "eos_token_id": 151645,
    }
    theirs |= {"mm_projector_type": "mlp2x_gelu", "mm_spatial_pool_mode": "bilinear", "mm_newline_position": "grid",
               "mm_spatial_pool_stride": 2, "mm_vision_tower": "google/siglip-so400m-patch14-384"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(theirs))
    weights = {their_name(name): weight.contiguous() for name, weight in built.state_dict().items()}
    names = sorted(weights)
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name] for name in chosen}, folder / f"model-0000{part}-of-00002.safetensors")
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"x{i}": i for i in range(len(vocabulary), 151643)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        )
    )
    return folder


@pytest.fixture(scope="module")
def rewritten(parts, published, tmp_path_factory):
    target = tmp_path_factory.mktemp("ours") / "llava_video"
    rewrite(published, target, parts[0].shape, parts[0].processor)
    return target


@pytest.mark.full
def test_a_rewritten_checkpoint_loads_as_the_same_model_and_reads_the_same_prompt(parts, rewritten):
    _, config, built, processor = parts
    loaded = Source.of(node("hf", path=str(rewritten), dtype="float32", device="cpu")).load()
    found, expected = loaded.model.state_dict(), built.state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert (loaded.family.name, loaded.family.video_token_ids) == ("LLaVA-Video", (config.video_token_id,))
    assert loaded.model.config.video_pooling == loaded.processor.video_pooling == "bilinear"
    frames = torch.randint(
        0, 256, (2, 30, 40, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    ).numpy()
    messages = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what happens?"}]}]
    ids = {}
    for name, one in (("ours", processor), ("loaded", loaded.processor)):
        text = one.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        made = one(text=[text], videos=[frames], return_tensors="pt", do_sample_frames=False)
        ids[name] = int((made["input_ids"] == config.video_token_id).sum()), text, made["pixel_values_videos"]
    assert ids["ours"][:2] == ids["loaded"][:2] and ids["ours"][0] == 420
    assert torch.equal(ids["ours"][2], ids["loaded"][2])


@pytest.mark.full
def test_pooling_may_be_chosen_when_a_folder_is_rewritten(parts, published, tmp_path):
    rewrite(published, tmp_path / "new", parts[0].shape, parts[0].processor, "average")
    source = Source.of(node("hf", path=str(tmp_path / "new"), dtype="float32", device="cpu"))
    assert source.hf_config.video_pooling == source.load().processor.video_pooling == "average"


def test_names_of_other_weights_have_no_place():
    assert new_name("model.vision_resampler.x") is None and new_name("model.mm_projector.1.weight") is None
    assert all(new_name(their_name(name)) == name for name in ("lm_head.weight", "model.language_model.norm.weight"))


@pytest.mark.slow
@each(
    ("change", "words"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "not LlavaQwenForCausalLM"),
        ({"mm_newline_position": "one_token"}, "mm_newline_position is 'one_token', and only 'grid' is known"),
        ({"add_faster_video": True}, "add_faster_video is True"),
        ({"mm_vision_tower": "openai/clip-vit-large-patch14-336"}, "its vision tower is openai/clip"),
        ({"mm_spatial_pool_mode": "max"}, "frames pooled by 'max' are not known"),
        ({"hidden_size": 32}, "has no place in LLaVA-Video"),
        ({"num_hidden_layers": 4}, "lacks 12 weights"),
    ],
)
def test_other_checkpoints_are_refused(parts, published, tmp_path, change, words):
    folder = tmp_path / "other"
    folder.mkdir()
    for file in published.iterdir():
        (folder / file.name).symlink_to(file)
    values = json.loads((published / "config.json").read_text()) | change
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words):
        rewrite(folder, tmp_path / "new", parts[0].shape, parts[0].processor)


@pytest.mark.slow
def test_the_command_says_in_one_sentence_what_is_missing(tmp_path, published, rewritten, capsys):
    assert main([str(tmp_path), str(tmp_path / "new")]) == 2
    assert "has no readable config.json" in capsys.readouterr().err
    assert main([str(published), str(rewritten)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert set(load_file(rewritten / "model-00001-of-00002.safetensors")) and plain(node(NAME).shape)["video_pooling"]
