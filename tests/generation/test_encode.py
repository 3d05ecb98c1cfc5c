"""Prompts with images and videos: what a family's own processor makes of them is what its model takes."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
import yaml
from PIL import Image

from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.evaluation.generating import generate
from mmkv_bench.evaluation.samples import Request
from mmkv_bench.families.facts import model_facts
from mmkv_bench.families.registry import apply_limits
from mmkv_bench.generation.encode import EncodedPrompt, encode, lengths_of, rendered
from mmkv_bench.generation.processed_media import SharedMedia
from mmkv_bench.models.processor import build_processor
from mmkv_bench.protocols import protocol
from tests import cover
from tests.clips import write_clip
from tests.each import each
from tests.models.checkpoints import SETTINGS, small_config
from tests.models.checkpoints import processor as processor_of

MUIRBENCH = Path(__file__).parents[2] / "conf" / "dataset" / "muirbench.yaml"
MULTIMODAL = tuple(name for name in SETTINGS if name != "llama")
VIDEO = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next_video", "llava_onevision", "internvl")
FEATURES = {
    "llava_next_video": 144,
    "llava_onevision": 196,
    "internvl": 256,
}  # tokens of a frame; OneVision ends with one


@functools.cache
def parts(name: str):
    config, processor = small_config(name), processor_of(name)
    return config, processor, model_facts(config, getattr(processor, "tokenizer", processor))


@functools.cache
def model(name: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = small_config(name)
    auto = tf.AutoModelForCausalLM if name == "llama" else tf.AutoModelForImageTextToText
    return auto.from_config(config).eval()


def answer(name: str, prompt: EncodedPrompt) -> torch.Tensor:
    """Logits [vocabulary] after the prompt; the model refuses one whose visual tokens are not as many as its features."""
    with torch.no_grad():
        logits = model(name)(**prompt.inputs, logits_to_keep=1).logits[0, -1]
    assert bool(logits.isfinite().all())
    return logits


def ask(name: str, images=(), videos=(), text: str = "What is it?", processor=None, **limits) -> EncodedPrompt:
    content = (
        [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos] + [{"type": "text", "text": text}]
    )
    _, own, family = parts(name)
    return encode(processor or own, family, "sample", [{"role": "user", "content": content}], images, videos, **limits)


def picture(width: int = 120, height: int = 100, red: int = 50) -> Image.Image:
    return Image.new("RGB", (width, height), (red, 100, 200))


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(write_clip(tmp_path_factory.mktemp("clips") / "clip.mp4", size=(128, 96)))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return str(write_clip(tmp_path_factory.mktemp("clips") / "short.webm", frames=5, size=(128, 96)))


@pytest.mark.slow
@cover.few("name", SETTINGS, keep=1)
def test_a_text_only_prompt_is_taken_by_every_family(name):
    prompt = ask(name)
    assert prompt.visual_tokens == 0 and len(answer(name, prompt)) > 32000
    tokenizer = getattr(parts(name)[1], "tokenizer", parts(name)[1])
    assert "What is it?" in tokenizer.decode(prompt.input_ids[0])


@pytest.mark.full
@cover.few("name", MULTIMODAL, keep=3, first=1)
@each("count", [1, 2])
def test_every_visual_token_has_its_feature(name, count):
    images = [picture(red=50 + 100 * i) for i in range(count)]
    prompt = ask(name, images)
    assert prompt.visual_tokens > 0
    other = ask(name, [picture(red=255)] + images[1:])
    assert torch.equal(prompt.input_ids, other.input_ids)
    assert not torch.equal(answer(name, prompt), answer(name, other))  # pixels reach the last token


@pytest.mark.full
@each("name", VIDEO)
def test_a_video_file_end_to_end(name, clip):
    prompt = ask(name, videos=[clip], frames=6)
    answer(name, prompt)
    if name in FEATURES:
        assert prompt.visual_tokens == 6 * FEATURES[name] + (name == "llava_onevision")
    else:
        patches = int(prompt.inputs["video_grid_thw"].prod())
        assert prompt.inputs["video_grid_thw"][0, 0] == 3 and prompt.visual_tokens == patches // 4  # frames in pairs
        assert "mm_token_type_ids" in prompt.inputs
    wanted = 1 if name == "internvl" else 2  # the HF port of InternVL feeds frames as images
    assert set(prompt.types[0].tolist()) == {0, wanted}


@pytest.mark.full
@each("name", VIDEO)
def test_a_video_with_fewer_frames_than_asked_gives_all_it_has(name, short):
    prompt = ask(name, videos=[short], frames=32)
    answer(name, prompt)
    if name in FEATURES:
        assert prompt.visual_tokens == 5 * FEATURES[name] + (name == "llava_onevision")
    else:
        assert prompt.inputs["video_grid_thw"][0, 0] == 3  # the fifth frame is paired with itself


@pytest.mark.slow
@each("name", VIDEO, keep=2)
def test_images_and_videos_in_one_prompt(name, clip):
    prompt = ask(name, [picture()], [clip, clip], frames=4)
    answer(name, prompt)
    single = ask(name, [picture()]), ask(name, videos=[clip], frames=4)
    assert prompt.visual_tokens == single[0].visual_tokens + 2 * single[1].visual_tokens


def test_thirty_two_frames_are_the_default(clip):
    assert ask("qwen2_5_vl", videos=[clip]).inputs["video_grid_thw"][0, 0] == 16


def test_the_pixels_are_those_of_the_sampled_frames(clip):
    """Frame i of the clip is grey of level 6 i; two neighbours make one patch in time."""
    pixels = ask("qwen2_5_vl", videos=[clip], frames=8).inputs["pixel_values_videos"]
    mean, std = tf.image_utils.OPENAI_CLIP_MEAN[0], tf.image_utils.OPENAI_CLIP_STD[0]
    red = pixels.view(4, -1, 3, 2, 14 * 14)[:, :, 0].mean(dim=(1, 3)) * std + mean  # [pair, frame of the pair]
    assert (red * 255 / 6).flatten().round().tolist() == pytest.approx([0, 5, 11, 16, 22, 27, 33, 39], abs=1)


def test_qwen2_5_is_told_the_seconds_between_its_frames(clip):
    whole = ask("qwen2_5_vl", videos=[clip], frames=8).inputs["second_per_grid_ts"]
    assert whole.tolist() == pytest.approx([2 / (8 / 4.0)])  # 8 frames of 4 s, two to a grid
    span = {"video": clip, "start_time": 1.0, "end_time": 2.95}
    assert ask("qwen2_5_vl", videos=[span], frames=8).inputs["second_per_grid_ts"].tolist() == pytest.approx([0.5])


def test_seconds_reach_the_positions_of_qwen2_5(clip):
    """Frames that lie further apart have the same tokens at positions further apart."""
    apart = ask("qwen2_5_vl", videos=[clip], frames=8)
    close = ask("qwen2_5_vl", videos=[{"video": clip, "end_time": 0.75}], frames=8)
    assert torch.equal(apart.input_ids, close.input_ids)

    def length(prompt: EncodedPrompt) -> int:
        inputs = {key: prompt.inputs[key] for key in ("input_ids", "mm_token_type_ids", "video_grid_thw")}
        seconds = prompt.inputs["second_per_grid_ts"]
        positions, _ = model("qwen2_5_vl").model.get_rope_index(**inputs, second_per_grid_ts=seconds)
        return int(positions[0, 0, prompt.types[0] > 0].max() - positions[0, 0, prompt.types[0] > 0].min())

    assert length(apart) == int(3 * 1.0 * 2)  # three steps of 1 s at 2 positions a second
    assert length(close) == int(3 * 0.2 * 2)


def times(prompt: EncodedPrompt) -> list[str]:
    text = parts("qwen3_vl")[1].tokenizer.decode(prompt.input_ids[0])
    return [piece.partition(" seconds>")[0] for piece in text.split("<") if " seconds>" in piece]


@pytest.mark.slow
def test_qwen3_writes_the_true_time_of_every_pair_of_frames(clip, tmp_path):
    assert times(ask("qwen3_vl", videos=[clip], frames=4)) == ["0.7", "3.2"]  # frames at 0, 1.3, 2.6, 3.9 s
    late = {"video": clip, "start_time": 2.0}
    assert times(ask("qwen3_vl", videos=[late], frames=4)) == ["2.3", "3.5"]  # at 2.0, 2.6, 3.2, 3.9 s
    pause = [100 * i + (10_000 if i >= 2 else 0) for i in range(4)]
    uneven = write_clip(tmp_path / "uneven.mkv", frames=4, times=pause, size=(128, 96))
    assert times(ask("qwen3_vl", videos=[str(uneven)], frames=4)) == ["0.1", "10.2"]


@each(
    "frames",
    [
        [picture(128, 96, 10 * i) for i in range(5)],
        [np.full((96, 128, 3), 10 * i, np.uint8) for i in range(5)],
        np.zeros((5, 96, 128, 3), np.uint8),
    ],
)
def test_ready_frames_are_a_video_of_two_frames_per_second(frames):
    prompt = ask("qwen2_5_vl", videos=[frames], frames=4)
    assert prompt.inputs["video_grid_thw"].tolist() == [[2, 6, 10]]  # 96x128 -> 84x140, 4 of 5 frames
    assert prompt.inputs["second_per_grid_ts"].tolist() == pytest.approx([2 / (4 / 5 * 2)])
    assert times(ask("qwen3_vl", videos=[frames], frames=5)) == ["0.2", "1.2", "2.0"]


def test_ready_frames_of_different_sizes_are_refused():
    with pytest.raises(DataError, match="one size"):
        ask("qwen2_5_vl", videos=[[picture(128, 96), picture(96, 96)]])


@pytest.mark.parametrize("name", ["llava", "llava_next", "llama"])
def test_a_family_without_videos_says_so(name, clip):
    with pytest.raises(UnsupportedError, match="takes no videos"):
        ask(name, videos=[clip])


def test_a_text_model_says_that_it_takes_no_images():
    with pytest.raises(UnsupportedError, match="takes no images"):
        ask("llama", [picture()])


@pytest.mark.slow
@each("name", VIDEO)
def test_videos_of_different_lengths_are_taken_or_refused_with_what_to_do(name, clip, short):
    if name in FEATURES:
        with pytest.raises(UnsupportedError, match=r"have \[5, 8\] frames.*model\.frames=5"):
            ask(name, videos=[clip, short], frames=8)
    else:
        prompt = ask(name, videos=[clip, short], frames=8)
        answer(name, prompt)


def test_a_broken_video_is_a_data_error(tmp_path):
    path = tmp_path / "broken.mp4"
    path.write_bytes(b"no video at all")
    with pytest.raises(DataError, match=r"^video broken\.mp4 cannot be decoded"):
        ask("qwen2_5_vl", videos=[str(path)])


@functools.cache
def limited(name: str, video_max_pixels: int):
    processor = build_processor(small_config(name), SETTINGS[name])
    apply_limits(processor, video_max_pixels=video_max_pixels, frames=32)
    return processor


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@each("frames", [1, 2, 5, 16])
def test_no_frame_has_more_pixels_than_asked(name, frames, tmp_path):
    clip = str(write_clip(tmp_path / "wide.mp4", frames=max(frames, 2), size=(320, 180)))
    side = 32 if name == "qwen3_vl" else 28
    limit = 20 * side * side
    images = [picture(500, 400)]
    prompt = ask(name, images, [clip], processor=limited(name, limit), frames=frames, video_max_pixels=limit)
    assert int((prompt.types == 1).sum()) == ask(name, images).visual_tokens  # images keep their own limits
    _, height, width = prompt.inputs["video_grid_thw"][0].tolist()
    assert 0.7 * 20 <= height * width / 4 <= 20


@each(("name", "marker"), [("llava", "<image>"), ("qwen2_5_vl", "<|image_pad|>")])
def test_a_question_that_spells_a_marker_is_refused(name, marker):
    with pytest.raises(UnsupportedError, match="the question contains this marker"):
        ask(name, [picture()], text=f"What does {marker} mean?")


@pytest.mark.slow
@cover.few("name", MULTIMODAL, keep=3)
def test_pictures_of_muirbench_stand_where_its_questions_say_so_in_every_family(name):
    """Two pictures with words between them, as its third sample asks, and three that are its options."""
    for request, blocks in zip(muirbench(), (2, 3), strict=True):
        _, processor, family = parts(name)
        prompt = encode(processor, family, request.sample_id, request.messages, request.images)
        assert starts(prompt) == blocks and len(request.images) == blocks
        apart = [part["text"] for part in request.messages[0]["content"] if part["type"] == "text"]
        assert len(apart) == blocks + 1 and not any("<image>" in text for text in apart)


def starts(prompt: EncodedPrompt) -> int:
    """Stretches of visual tokens with text between them; a tiled picture is one: five tokens or fewer stand between its tiles."""
    seen = (prompt.types[0] > 0).int()
    gaps = torch.diff(seen.nonzero().flatten())
    return 1 + int((gaps > 5).sum())


@functools.cache
def muirbench() -> list[Request]:
    """Samples 2 and 4 of the dataset's own data, as a run asks them."""
    spec = spec_from_config("muirbench", yaml.safe_load(MUIRBENCH.read_text()), {"source": "fixture"})
    found: list[Request] = []
    generate(spec, lambda request: found.append(request) or "", wanted=lambda ref: ref.doc_id in (2, 4))
    return found


def test_places_and_media_are_counted():
    _, processor, family = parts("llava")
    message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(DataError, match="1 placeholders for images, but 2 images"):
        encode(processor, family, "sample", message, [picture(), picture()])


def test_several_images_of_onevision_are_taken_whole():
    """As it was trained: a single image in tiles, each of several as one tile of 729 tokens and a newline."""
    assert ask("llava_onevision", [picture()]).visual_tokens > 1000
    assert ask("llava_onevision", [picture(), picture()]).visual_tokens == 2 * 730


def test_a_text_prompt_is_cut_behind_its_document():
    _, processor, family = parts("llama")
    page, heads = "The code of Ann is 123.\nThe code of Bob is 456.", set()
    for question in ("Which code has Ann?", "\n\nBob?", "7"):
        prompt = ask("llama", text=f"{page}{question}", context=page)
        lengths = lengths_of(protocol("query_agnostic"), prompt, family)
        before, after = (processor.decode(part) for part in prompt.input_ids[0].tensor_split([lengths.candidates]))
        kept = before.partition("<|end_header_id|>\n\n")[2]
        assert page.startswith(kept) and len(page) - len(kept) <= 4 and after.startswith(page[len(kept) :] + question)
        heads.add(tuple(prompt.input_ids[0, : lengths.candidates].tolist()))
        assert lengths_of(protocol("paper"), prompt, family).candidates == prompt.length
    assert len({head[:-4] for head in heads}) == 1, "of one document, whatever is asked"
    for context in ("", "a text that the prompt lacks"):
        with pytest.raises(UnsupportedError, match="text only.*context_key"):
            lengths_of(protocol("query_agnostic"), ask("llama", text=page, context=context), family)


def test_a_prompt_longer_than_the_context_is_refused(clip):
    config, processor, _ = parts("internvl")
    config = small_config("internvl")
    config.text_config.max_position_embeddings = 1000
    message = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(UnsupportedError, match="more than the model's context of 1000"):
        encode(processor, model_facts(config, processor.tokenizer), "sample", message, videos=[clip], frames=4)


@pytest.mark.slow
@each("name", MULTIMODAL)
def test_dialogues_render_every_role(name):
    _, processor, family = parts(name)
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "First?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        {"role": "user", "content": "Second?"},
    ]
    prompt = encode(processor, family, "sample", messages, [picture()])
    text = processor.tokenizer.decode(prompt.input_ids[0])
    places = [text.index(words) for words in ("Be brief.", "First?", "Yes.", "Second?")]
    assert places == sorted(places)
    bos = processor.tokenizer.bos_token
    assert bos is None or (text.startswith(bos) and text.count(bos) == 1)


IMAGES_FIRST = (
    "{% for message in messages %}{{ message.role.upper() + ': ' }}"
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def test_an_image_stays_where_its_message_has_it_whatever_the_template_does():
    """LLaVA-1.5's template on the hub writes images first; this one does as well."""
    processor = build_processor(small_config("llava"), SETTINGS["llava"])
    image, before, after = {"type": "image"}, {"type": "text", "text": "a "}, {"type": "text", "text": "b"}
    in_order = rendered(processor, [{"role": "user", "content": [before, image, after, image]}])
    assert in_order == "USER: a <image>\nb<image>\n ASSISTANT:"
    processor.chat_template = IMAGES_FIRST
    found = [
        rendered(processor, [{"role": "user", "content": content}])
        for content in ([before, image, after, image], [image, before, after], [image, after], [before])
    ]
    assert found == [
        "USER: a <image>\nb<image>\n ASSISTANT:",
        "USER: <image>\na  b ASSISTANT:",  # nothing to move: the template's own words
        "USER: <image>\nb ASSISTANT:",
        "USER: a  ASSISTANT:",
    ]


class Counting:
    """An image or video processor that counts its calls."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *media, **settings):
        self.calls += 1
        return self.inner(*media, **settings)


@pytest.mark.slow
@each("name", MULTIMODAL, keep=4)
def test_prompts_about_the_same_pictures_share_what_was_made_of_them_and_nothing_else(name, clip):
    for kind in ("image", *(["video"] if name in VIDEO else [])):
        media = {"images": [picture(), picture(64, 90)]} if kind == "image" else {"videos": [clip], "frames": 4}
        processor = copy.copy(parts(name)[1])
        part = "image_processor" if kind == "image" else "video_processor"
        counting = Counting(getattr(processor, part))
        setattr(processor, part, counting)
        shared = SharedMedia(processor)
        for text in ("What is it?", "  How many are there, and where?", "<2>"):
            prompt, alone = ask(name, text=text, shared=shared, **media), ask(name, text=text, **media)
            assert set(prompt.inputs) == set(alone.inputs)
            for key, value in alone.inputs.items():
                assert torch.equal(prompt.inputs[key], value), key
        assert counting.calls == 1
