"""The written-down rules give the numbers that each family's own processor makes, at the checkpoints' own settings."""

from __future__ import annotations

import functools

import pytest
import torch
import transformers as tf
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmkv_bench.config.files import content, options
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import PixelLimits
from mmkv_bench.families.registry import apply_limits, image_tokens, video_tokens
from mmkv_bench.generation.video_inputs import video_arguments
from mmkv_bench.models.processor import build_processor
from mmkv_bench.models.shape import config_of
from mmkv_bench.models.video import Frames
from tests import cover
from tests.cli.setting import verb
from tests.each import each
from tests.models.checkpoints import SETTINGS, small_config

MULTIMODAL = tuple(name for name in SETTINGS if name != "llama")
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next_video", "llava_onevision", "internvl", "smolvlm")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CONFIGS = sorted(name for name in options("model") if (content("model", name).get("processor") or {}).get("image"))

few = settings(max_examples=8, deadline=None)  # real pixels
many = settings(max_examples=cover.examples(80), deadline=None)  # arithmetic of the processor
sides = st.integers(20, 500)
wide_sides = st.integers(20, 6000)


@functools.cache
def built(name: str, min_pixels: int | None = None, max_pixels: int | None = None, video_max_pixels: int | None = None):
    processor = build_processor(small_config(name), SETTINGS[name])
    apply_limits(processor, min_pixels, max_pixels, video_max_pixels, 32)
    return processor


def kind(name: str) -> str:
    return small_config(name).model_type


def images_seen(processor, *sizes: tuple[int, int]) -> int:
    """Visual tokens that the processor writes for images of these (width, height)."""
    pictures = [torch.zeros(3, height, width, dtype=torch.uint8) for width, height in sizes]
    nested = "batch_num_images" in processor.image_processor.model_input_names
    inputs = processor(
        text=[processor.image_token * len(sizes)], images=[pictures] if nested else pictures, return_tensors="pt"
    )
    token = processor.image_token_ids[0]  # Gemma 3 writes others in the place of a picture's marker
    return int((inputs["input_ids"] == token).sum())


def video_seen(processor, frames: int, width: int, height: int, video_max_pixels: int | None = None) -> int:
    clip = Frames(
        torch.zeros(frames, height, width, 3, dtype=torch.uint8).numpy(), (0.0,) * frames, (0,) * frames, 9, 1.0
    )
    arguments = video_arguments(processor, [clip], video_max_pixels)
    inputs = processor(text=[processor.video_token], return_tensors="pt", **arguments)
    token = getattr(processor, "video_token_id", None)
    if getattr(processor, "start_image_token", None) or token is None:  # InternVL and SmolVLM write image tokens
        token = processor.image_token_id
    return int((inputs["input_ids"] == token).sum())


@cover.few("name", MULTIMODAL, keep=2, first=1)
def test_images_have_the_tokens_that_the_processor_writes(name):
    @few
    @given(width=sides, height=sides)
    def check(width, height):
        assert image_tokens(kind(name), SETTINGS[name], width, height) == images_seen(built(name), (width, height))

    check()


@pytest.mark.full
@cover.few("name", MULTIMODAL, keep=4)
def test_images_of_any_size_have_the_tokens_that_the_processor_counts(name):
    processor = built(name)

    def counted(width, height):
        if hasattr(processor, "image_seq_len"):  # Idefics3 counts markers as well, SmolVLM only tiles
            tiles, *_ = processor.image_processor.get_number_of_image_patches(height, width)
            return processor.image_seq_len * max(tiles, 1)
        markers = 2 if name == "internvl" else 0  # it counts <img> and </img>, too
        return processor._get_num_multimodal_tokens([(height, width)]).num_image_tokens[0] - markers

    @many
    @given(width=wide_sides, height=wide_sides)
    def check(width, height):
        assume(name not in QWEN or max(width, height) <= 200 * min(width, height))
        assert image_tokens(kind(name), SETTINGS[name], width, height) == counted(width, height)

    check()


@pytest.mark.full
@each("name", MULTIMODAL)
def test_several_images_of_one_prompt_have_each_its_own(name):
    sizes = [(300, 200), (100, 350)]
    alone = [image_tokens(kind(name), SETTINGS[name], *size, images=2) for size in sizes]
    assert images_seen(built(name), *sizes) == sum(alone)


@each("name", ["llava_next", "llava_onevision"])
def test_the_model_itself_cuts_padding_to_the_same_number(name):
    """Model and processor count apart from each other, and a difference would be a refused prompt."""
    from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches as tiles_of

    config = small_config(name)
    model = tf.AutoModelForImageTextToText.from_config(config).model
    per_tile, how = {
        "llava_next": (24**2, {"vision_feature_select_strategy": "default"}),
        "llava_onevision": (27**2, {"vision_aspect_ratio": "anyres_max_9"}),
    }[name]

    @settings(max_examples=cover.examples(60), deadline=None)
    @given(width=st.integers(20, 1500), height=st.integers(20, 1500))
    def check(width, height):
        tiles = tiles_of([height, width], config.image_grid_pinpoints, config.vision_config.image_size)
        features, size = [torch.zeros(tiles, per_tile, 32)], torch.tensor([[height, width]])
        packed, _ = model.pack_image_features(features, size, image_newline=model.image_newline, **how)
        assert len(packed[0]) == image_tokens(kind(name), SETTINGS[name], width, height)

    check()


@pytest.mark.full
@each("name", QWEN)
def test_pixel_limits_bind_images(name):
    low, high = 100 * 32 * 32, 250 * 32 * 32
    processor, limits = built(name, low, high), PixelLimits(min_pixels=low, max_pixels=high)

    @few
    @given(width=sides, height=sides)
    def check(width, height):
        found = image_tokens(kind(name), SETTINGS[name], width, height, limits=limits)
        assert found == images_seen(processor, (width, height))
        assert found <= high / 28**2

    check()


@pytest.mark.full
@each("name", VIDEO)
def test_videos_have_the_tokens_that_the_processor_writes(name):
    @few
    @given(frames=st.integers(1, 7), width=st.integers(20, 200), height=st.integers(20, 200))
    def check(frames, width, height):
        assert video_tokens(kind(name), SETTINGS[name], frames, width, height) == video_seen(
            built(name), frames, width, height
        )

    check()


@pytest.mark.full
@each("name", QWEN)
def test_pixel_limits_bind_frames(name):
    limit = 20 * 32 * 32
    processor, limits = built(name, video_max_pixels=limit), PixelLimits(video_max_pixels=limit)

    @settings(max_examples=20, deadline=None)
    @given(frames=st.integers(1, 9), width=st.integers(20, 400), height=st.integers(20, 400))
    def check(frames, width, height):
        found = video_tokens(kind(name), SETTINGS[name], frames, width, height, limits)
        assert found == video_seen(processor, frames, width, height, limit)
        assert found <= -(-frames // 2) * limit / (32 if name == "qwen3_vl" else 28) ** 2

    check()


@pytest.mark.full
@each("name", QWEN)
def test_the_share_of_a_context_binds_frames_where_settings_ask_for_it(name):
    changed = SETTINGS[name] | {
        "video": SETTINGS[name]["video"] | {"cap_pixels_per_frame": True, "max_video_tokens": 40 if "3" in name else 60}
    }
    processor = build_processor(small_config(name), changed)
    for frames, width, height in [(2, 300, 200), (6, 300, 200), (9, 400, 120)]:
        capped = video_tokens(kind(name), changed, frames, width, height)
        assert capped == video_seen(processor, frames, width, height)
        assert capped < video_tokens(kind(name), SETTINGS[name], frames, width, height)


@each(
    ("name", "size", "tokens"),
    [
        ("llava", (1000, 30), 576),
        ("qwen2_5_vl", (224, 224), 64),  # 8 x 8 squares of 28
        ("qwen2_5_vl", (1344, 896), 48 * 32),
        ("qwen2_5_vl", (10, 10), 4),  # scaled up to 3136 pixels
        ("qwen3_vl", (1024, 512), 32 * 16),
        ("llava_next", (672, 672), 576 + 48 * 49),  # published as 2880 and a newline for each of 48 rows
        ("llava_next", (336, 336), 576 + 24 * 25),  # no resolution of the grid is square and so small: half is padding
        ("llava_onevision", (384, 384), 729 + 27 * 28),
        ("internvl", (448, 448), 256),
        ("internvl", (896, 448), 3 * 256),
        ("idefics3", (2048, 512), 5 * 64),
        ("idefics3", (100, 100), 17 * 64),  # scaled up to 2048 x 2048
        ("idefics3", (1536, 2048), 13 * 64),
        ("smolvlm", (640, 480), 13 * 81),
        ("gemma3", (1700, 300), 256),
    ],
)
def test_known_sizes(name, size, tokens):
    assert image_tokens(kind(name), SETTINGS[name], *size) == tokens


def test_known_videos():
    assert video_tokens("llava_onevision", SETTINGS["llava_onevision"], 32, 640, 480) == 32 * 196 + 1
    assert video_tokens("llava_next_video", SETTINGS["llava_next_video"], 8, 640, 480) == 8 * 144
    assert video_tokens("internvl", SETTINGS["internvl"], 32, 640, 480) == 32 * 256
    assert video_tokens("smolvlm", SETTINGS["smolvlm"], 32, 640, 480) == 32 * 81
    assert video_tokens("qwen2_5_vl", SETTINGS["qwen2_5_vl"], 31, 280, 140) == 16 * 50
    assert video_tokens("qwen2_5_vl", SETTINGS["qwen2_5_vl"], 32, 280, 140) == 16 * 50


def test_what_a_family_does_not_take_is_refused():
    with pytest.raises(UnsupportedError, match="takes no images"):
        image_tokens("llama", SETTINGS["llama"], 10, 10)
    with pytest.raises(UnsupportedError, match="takes no videos"):
        video_tokens("llava", SETTINGS["llava"], 8, 10, 10)
    with pytest.raises(UnsupportedError, match="200 times"):
        image_tokens("qwen2_vl", SETTINGS["qwen2_vl"], 2010, 10)


@pytest.mark.full
@cover.few("name", CONFIGS, keep=4, first=1)
def test_every_models_configuration_has_the_settings_that_the_rules_need(name):
    node = content("model", name)
    processor = build_processor(config_of(node["shape"]), node["processor"])
    for size in [(300, 200), (90, 400)]:
        assert image_tokens(node["shape"]["model_type"], node["processor"], *size) == images_seen(processor, size)
    if hasattr(processor, "video_processor"):
        assert video_tokens(node["shape"]["model_type"], node["processor"], 3, 90, 60) == video_seen(
            processor, 3, 90, 60
        )


@pytest.mark.slow
def test_the_command_prints_tokens_and_bytes(capsys):
    assert verb("tokens")(["model=qwen2_5_vl_7b", "1344x896", "28x560"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0] == "qwen2_5_vl_7b: 56 KiB of keys and values per token in bfloat16"
    )  # 28 layers x 4 heads x 128 x 2 x 2
    assert lines[1:] == [
        "  image 1344x896: 1,536 visual tokens, 84.0 MiB",
        "  image 28x560: 20 visual tokens, 1.1 MiB",
        "  together: 1,556 visual tokens, 85.1 MiB",
    ]
    assert verb("tokens")(["model=llava_onevision_7b", "640x480", "model.frames=32"]) == 0
    assert "32 frames of 640x480: 6,273 visual tokens" in capsys.readouterr().out


@pytest.mark.full
@each(
    ("words", "why"),
    [
        (["model=qwen2_5_vl_7", "10x10"], "did you mean"),
        (["model=qwen2_5_vl_7b"], "needs a model and a size"),
        (["10x10"], "needs a model and a size"),
        (["model=qwen2_5_vl_7b", "10x"], "is neither a size"),
        (["model=qwen2_5_vl_7b", "10x10", "model.frames=0"], "whole number >= 1"),
        (["model=qwen2_5_vl_7b", "10x10", "model.frame=3"], "did you mean"),
        (["model=llava_v1_5_7b", "10x10", "model.frames=3"], "takes no videos"),
        (
            ["model=llava_v1_5_7b", "10x10", "model.max_pixels=1000"],
            "scales to fixed sizes, and only Qwen-VL has pixel limits",
        ),
        (["model=qwen2_5_vl_7b", "10x10", "model.min_pixels=5000", "model.max_pixels=1000"], "contradict each other"),
        (
            ["model=qwen2_5_vl_7b", "10x10", "model.max_pixels=1000"],
            "at least 3136 and at most 1000 pixels contradict each other",
        ),
        (
            ["model=qwen3_vl_8b", "64x48", "model.frames=4", "model.min_pixels=999"],
            "min_pixels has no effect on videos",
        ),
        (["model=qwen2_5_vl_7b", "10x10", "model.video_max_pixels=9999"], "video_max_pixels has no effect on images"),
    ],
)
def test_a_wrong_command_is_one_sentence(capsys, words, why):
    assert verb("tokens")(words) == 2
    assert why in capsys.readouterr().err
