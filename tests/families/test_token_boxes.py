"""Which token shows what: predicted boxes against what changes in the model's own features when a cell is painted.

The oracle knows no geometry. The family's processor and the model's own `get_image_features` run on a page and on the same
page with one cell painted over; the tower's layers are set to zero, so that they add nothing and a token's feature depends
on its own pixels alone. Tokens whose features differ saw the cell.
"""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmkv_bench.calibrate.samples import visual_tokens
from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import Box
from mmkv_bench.families.registry import token_boxes
from mmkv_bench.generation.encode import encode
from mmkv_bench.models.source import Source
from tests import cover
from tests.each import each
from tests.families.shapes import small

MODELS = ("qwen2_5_vl_7b", "qwen3_vl_8b", "llava_v1_5_7b", "llava_v1_6_vicuna_7b", "llava_v1_6_mistral_7b",
          "llava_onevision_7b", "llava_video_7b", "internvl3_2b", "smolvlm_256m", "smolvlm2_2_2b", "gemma3_4b")  # fmt: skip
TILED = ("llava_v1_6_mistral_7b", "llava_onevision_7b", "internvl3_2b", "smolvlm2_2_2b")
SIZES = ((448, 448), (672, 336), (300, 900), (1000, 180), (61, 47))
BLENDED = (1700, 1300)  # beyond LLaVA-OneVision's 9 tiles' worth of tokens


@functools.cache
def loaded(name: str):
    """A narrow model of the family whose vision tower adds nothing to its patches' embeddings."""
    made = Source.of(small(name, layers=2)).load()
    inner = made.model.model
    tower = next(getattr(inner, at) for at in ("vision_tower", "vision_model", "visual") if hasattr(inner, at))
    lists = [part for path, part in tower.named_modules() if path.split(".")[-1] in ("blocks", "layers", "layer")]
    assert [len(layers) for layers in lists] == [2], "the tower's layers are not found"
    with torch.no_grad():
        for parameter in lists[0].parameters():
            parameter.zero_()
    return made


def prompt_of(name: str, images: list[Image.Image]):
    made = loaded(name)
    asked = [{"role": "user", "content": [{"type": "image"}] * len(images) + [{"type": "text", "text": "?"}]}]
    return encode(made.processor, made.family, "page", asked, images)


def features(name: str, images: list[Image.Image]) -> torch.Tensor:
    """What the model puts in the place of each visual token, ``[tokens, width]``."""
    prompt = prompt_of(name, images)
    kinds = ("pixel_values", "image_grid_thw", "image_sizes", "batch_num_images")
    with torch.no_grad():
        found = loaded(name).model.model.get_image_features(
            **{kind: prompt.inputs[kind] for kind in kinds if kind in prompt.inputs}, return_dict=True
        )
    rows = torch.cat([feature.reshape(-1, feature.shape[-1]) for feature in found.pooler_output])
    assert len(rows) == prompt.visual_tokens
    return rows


def boxes_of(name: str, images: list[Image.Image]) -> list[Box | None]:
    made, prompt = loaded(name), prompt_of(name, images)
    sizes = [image.size for image in images]
    return token_boxes(made.model.config, made.processor, prompt.inputs, sizes, prompt.visual_tokens)


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (240, 235, 230))


def painted(images: list[Image.Image], number: int, box: tuple[int, int, int, int]) -> list[Image.Image]:
    """The same with (left, upper, right, lower) of one of them nearly black."""
    copies = [image.copy() for image in images]
    copies[number].paste((10, 15, 20), box)
    return copies


def overlapping(boxes, number: int, size: tuple[int, int], pixels: tuple[float, float, float, float]) -> set[int]:
    """Tokens whose box has a part in common with this part of an image."""
    (width, height), (left, top, right, bottom) = size, pixels
    return {
        n
        for n, b in enumerate(boxes)
        if b and b.image == number and left < b.right * width and b.left * width < right
        and top < b.bottom * height and b.top * height < bottom
    }  # fmt: skip


def check(name: str, sizes: list[tuple[int, int]], cells: list[tuple[int, int, int]], grid: tuple[int, int]) -> int:
    """Whether the tokens of each cell are those that saw it; returns how many did.

    Bicubic scaling with antialiasing reaches 2 pixels of the more coarse of image and scaled image, and one more is left
    to rounding. So:   tokens of the cell without such a border  <=  those that changed  <=  tokens of the cell with it;
    and what is predicted lies between the same two. The border is narrower than a token.
    """
    images = [blank(*size) for size in sizes]
    boxes, before, seen = boxes_of(name, images), features(name, images), 0
    for number, row, column in cells:
        width, height = sizes[number]
        (x0, x1), (y0, y1) = (
            (side * place // count, side * (place + 1) // count)
            for side, place, count in ((width, column, grid[1]), (height, row, grid[0]))
        )
        assert x0 < x1 and y0 < y1
        after = features(name, painted(images, number, (x0, y0, x1, y1)))
        changed = set((after - before).abs().amax(-1).gt(1e-5).nonzero().flatten().tolist())
        x, y = (2 * max(1, side / 336) + 1 for side in (width, height))
        inner = overlapping(boxes, number, (width, height), (x0 + x, y0 + y, x1 - x, y1 - y))
        outer = overlapping(boxes, number, (width, height), (x0 - x, y0 - y, x1 + x, y1 + y))
        if x1 - x0 <= 2 * x or y1 - y0 <= 2 * y:
            inner = set()
        predicted = set(visual_tokens([(number, row, column)], grid, boxes))
        where = f"{name} {sizes} cell {number, row, column} of {grid}"
        assert inner <= changed <= outer, f"{where}: {sorted(inner - changed)} {sorted(changed - outer)}"
        assert inner <= predicted <= outer, where
        seen += len(changed)
    return seen


def some_cells(size: tuple[int, int], count: int) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """The corners and others of a grid whose cells are wide enough to have an inside."""
    grid = tuple(max(1, min(8, side // 28)) for side in (size[1], size[0]))
    draw = random.Random(f"{size}")
    cells = [(0, 0, 0), (0, grid[0] - 1, grid[1] - 1)]
    return cells + [(0, draw.randrange(grid[0]), draw.randrange(grid[1])) for _ in range(count - 2)], grid


@pytest.mark.slow
@cover.cases(MODELS, SIZES, each=1, keep=1)
def test_the_tokens_of_a_cell_are_those_that_its_pixels_reach(name, combinations):
    for (size,) in combinations:
        cells, grid = some_cells(size, 4)
        assert check(name, [size], cells, grid) > 0 or (name == "llava_v1_5_7b" and size[0] != size[1])


@pytest.mark.full
@cover.few("name", TILED, first=1)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(width=st.integers(56, 1100), height=st.integers(56, 1100), seed=st.integers(0, 99))
def test_pages_of_any_size(name, width, height, seed):
    draw, grid = random.Random(seed), (max(1, min(9, height // 28)), max(1, min(9, width // 28)))
    assert check(name, [(width, height)], [(0, draw.randrange(grid[0]), draw.randrange(grid[1]))], grid) > 0


@pytest.mark.full
def test_blended_tokens_show_all_that_went_into_them():
    boxes = boxes_of("llava_onevision_7b", [blank(*BLENDED)])
    assert len(boxes) < 729 + 9.5 * 729 < 5 * 4 * 729, "this size is blended"
    assert check("llava_onevision_7b", [BLENDED], [(0, 3, 2), (0, 7, 5)], (9, 9)) > 0


@pytest.mark.full
@each("name", MODELS)
def test_several_images_have_each_its_own_tokens(name):
    sizes = [(224, 224), (300, 200), (90, 240)]
    assert check(name, sizes, [(0, 1, 1), (1, 2, 1), (2, 1, 0)], (4, 3)) > 0


# ---------------------------------------------------------------- by hand


def test_llava_1_5_shows_the_middle_of_a_page():
    """672x336: the middle square is the image from a quarter of its width to three quarters."""
    boxes = boxes_of("llava_v1_5_7b", [blank(672, 336)])
    assert len(boxes) == 576 and boxes[0] == Box(0, 0, boxes[0].bottom, boxes[0].left, boxes[0].right)
    assert (float(boxes[0].left), float(boxes[-1].right), float(boxes[-1].bottom)) == (0.25, 0.75, 1)
    assert visual_tokens([(0, 0, 0), (0, 0, 3)], (1, 4), boxes) == []
    assert visual_tokens([(0, 0, 1), (0, 0, 2)], (1, 4), boxes) == list(range(576))


def test_llava_next_shows_a_cell_in_the_whole_and_in_a_tile():
    """672x672 in 24x24 cells: a cell is one patch of the whole, and 2x2 patches of the 48x48 of the tiles (and newlines)."""
    boxes = boxes_of("llava_v1_6_vicuna_7b", [blank(672, 672)])
    assert len(boxes) == 576 + 48 * 49
    assert visual_tokens([(0, 13, 5)], (24, 24), boxes) == [
        13 * 24 + 5,
        *(576 + row * 49 + column for row in (26, 27) for column in (10, 11)),
    ]
    assert [n for n, box in enumerate(boxes) if box is None] == [576 + row * 49 + 48 for row in range(48)]


@pytest.mark.full
def test_internvl_shows_a_cell_in_its_tile_and_in_the_thumbnail():
    """896x448 is two tiles and the thumbnail of 16x16 tokens each; in 16x32 cells one is a token of a tile."""
    boxes = boxes_of("internvl3_2b", [blank(896, 448)])
    assert len(boxes) == 3 * 256
    assert visual_tokens([(0, 3, 20)], (16, 32), boxes) == [256 + 3 * 16 + 4, 512 + 3 * 16 + 10]


@pytest.mark.full
def test_the_last_pixels_of_a_tile_lie_in_no_token_of_llava_onevision():
    """384 = 27 * 14 + 6: of a page of one tile a cell of 6 pixels at the edge is seen by nobody, one of 8 is."""
    boxes = boxes_of("llava_onevision_7b", [blank(384, 384)])
    assert visual_tokens([(0, 0, 63)], (1, 64), boxes) == []
    assert len(visual_tokens([(0, 0, 47)], (1, 48), boxes)) == 2 * 27


# ---------------------------------------------------------------- what is refused


def asked(**changes):
    """Arguments of `token_boxes` of one square image, with these attributes of the image processor."""
    made = loaded("llava_v1_5_7b")
    part = made.processor.image_processor
    given_ = {key: getattr(part, key) for key in ("size", "crop_size", "do_resize", "do_center_crop", "do_pad")}
    other = SimpleNamespace(image_processor=SimpleNamespace(**(given_ | changes)))
    return made.model.config, other, {}, [(336, 336)]


def test_what_cuts_images_otherwise_is_refused():
    assert len(token_boxes(*asked(), 576)) == 576
    with pytest.raises(UnsupportedError, match="336x336 have 576 tokens by the rule of llava models but 577 in the"):
        token_boxes(*asked(), 577)
    for change, message in (
        ({"do_pad": True}, "do_pad=True; allowed for a llava model"),
        ({"do_center_crop": False}, "do_center_crop=False"),
        ({"size": {"height": 336, "width": 336}}, "'height': 336.*the shorter edge scaled"),
        ({"crop_size": {"height": 224, "width": 224}}, "but the vision tower takes 336 pixels"),
        ({"do_resize": False}, "do_resize=False"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            token_boxes(*asked(**change), 576)


def test_an_unknown_family_is_refused():
    with pytest.raises(
        UnsupportedError,
        match="model_type 'newer_vl' is not supported; supported families: Gemma 3 .text., Gemma 3, .*InternVL, .*Qwen2-VL",
    ):
        token_boxes(SimpleNamespace(model_type="newer_vl"), None, {}, [(10, 10)], 4)
