"""LLaVA with a CLIP tower: LLaVA-1.5, LLaVA-NeXT and LLaVA-NeXT-Video.

LLaVA-1.5          arXiv 2310.03744: 336x336 in patches of 14 = 576; the shorter edge is scaled to the tower's side and
                   the middle is cut out, so no token shows the rest of the image
LLaVA-NeXT         blog of 2024-01-30 (AnyRes): first the whole image, squashed into 336x336; then the image at
                   the best-fitting resolution, scaled with its aspect, padded on both sides and cut into tiles. Its
                   tokens are ordered by rows across all tiles, each row with a newline token, and without padding
LLaVA-NeXT-Video   images as LLaVA-NeXT; frames of 24x24 patches pooled by 2x2 = 144
"""

from __future__ import annotations

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.families.base import LLAMA, MISTRAL, QWEN2, SIDES, Box, Family, ImagePrompt, PixelLimits, Settings, Size
from mmkv_bench.families.tiles import anyres, anyres_boxes, clip_tokens, edge_of, grid, parts, patches


class Llava(Family):
    """Rules of LLaVA-1.5."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        return clip_tokens(settings)

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        scaler, edge = prompt.processor.image_processor, prompt.tower_edge()
        if not scaler.do_center_crop or getattr(scaler, "do_pad", False) or "shortest_edge" not in dict(scaler.size):
            raise UnsupportedError(
                f"the image processor has size={dict(scaler.size)}, do_center_crop={scaler.do_center_crop}, do_pad="
                f"{getattr(scaler, 'do_pad', False)}; allowed for a llava model: the shorter edge scaled, the "
                "middle cut out; restore the checkpoint's own processor files"
            )
        squares, boxes = patches(edge, prompt.config.vision_config.patch_size), []
        for image, size in enumerate(prompt.sizes):
            scaled = [edge * side // min(size) for side in size]
            columns, rows = (parts(squares, -((side - edge) // 2), side) for side in scaled)
            boxes += grid(image, rows, columns)
        return boxes


class LlavaNext(Family):
    """Rules of LLaVA-NeXT and LLaVA-NeXT-Video."""

    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        image_settings = settings["image"]
        edge = edge_of(image_settings)
        per_tile = edge // settings["processor"]["patch_size"]
        return clip_tokens(settings) + anyres(image_settings["image_grid_pinpoints"], edge, per_tile, size).tokens

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        per_side = edge_of(settings["video"]) // settings["processor"]["patch_size"]
        return frames * (per_side * per_side // 4)

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        edge, patch = prompt.tower_edge(), prompt.config.vision_config.patch_size
        boxes: list[Box | None] = []
        for image, size in enumerate(prompt.sizes):
            tiling = anyres(prompt.config.image_grid_pinpoints, edge, edge // patch, size)
            boxes += anyres_boxes(image, size, tiling, edge, patch)
        return boxes


_BACKBONES = (LLAMA, MISTRAL, QWEN2)
FAMILIES = (
    Llava(
        "llava",
        "LLaVA-1.5",
        _BACKBONES,
        "LlavaForConditionalGeneration",
        "LlavaProcessor",
        "CLIPImageProcessor",
        image_id_key="image_token_id",
    ),
    LlavaNext(
        "llava_next",
        "LLaVA-NeXT",
        _BACKBONES,
        "LlavaNextForConditionalGeneration",
        "LlavaNextProcessor",
        "LlavaNextImageProcessor",
        image_id_key="image_token_id",
        smaller_by=SIDES,
    ),
    LlavaNext(
        "llava_next_video",
        "LLaVA-NeXT-Video",
        _BACKBONES,
        "LlavaNextVideoForConditionalGeneration",
        "LlavaNextVideoProcessor",
        "LlavaNextImageProcessor",
        "LlavaNextVideoVideoProcessor",
        image_id_key="image_token_id",
        video_id_key="video_token_id",
        smaller_by=SIDES,
    ),
)
