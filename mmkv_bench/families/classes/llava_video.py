"""LLaVA-Video (Zhang et al. 2024, arXiv 2410.02713) as a variant of transformers' LLaVA-OneVision.

Both share SigLIP, the two-layer projector, Qwen2 and the treatment of images. Videos differ: OneVision pools each
frame's 27x27 features to 14x14 by bilinear interpolation and ends the video with one newline feature; LLaVA-Video ends
every row of every frame with a newline feature, 210 tokens a frame. Its paper and lmms-eval average 2x2 features to
13x13 instead (`average`, 182 tokens); its training script leaves the code's default, `bilinear`. The published weights
are in the format of their own repository; tools/llava_video_weights.py rewrites them for these classes. No code of that
repository is needed or run.

Not reproduced: the sentence with the frames' times that its config asks to put before the question
(`add_time_instruction`; lmms-eval leaves it out, too), and the faster stream of frames, which the checkpoints have off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionProcessor,
)
from transformers.models.llava_onevision.modeling_llava_onevision import (
    LlavaOnevisionModel,
    LlavaOnevisionPreTrainedModel,
)

from mmkv_bench.families.tiles import pooled_side, video_token_count

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

MODEL_TYPE = "llava_video"


class LlavaVideoConfig(LlavaOnevisionConfig):
    """OneVision's config with `video_pooling`: how 2x2 features of a frame become one; one of `tiles.POOLINGS`."""

    model_type = MODEL_TYPE
    video_pooling: str = "bilinear"


def pool_frames(features: Tensor, newline: Tensor, pooling: str) -> Tensor:
    """Pool the features of frames and append a newline to each row of each frame.

    Args:
        features: [frames, side * side, D], row by row; newline: [D]; pooling: one of `POOLINGS`.

    Returns:
        [frames, rows * (rows + 1), D] with rows = `pooled_side(side, pooling)`.
    """
    frames, count, width = features.shape
    side = math.isqrt(count)
    planes = features.view(frames, side, side, width).permute(0, 3, 1, 2)
    if pooling == "average":
        planes = nn.functional.avg_pool2d(planes, 2)
    else:
        planes = nn.functional.interpolate(planes, size=[pooled_side(side, pooling)] * 2, mode="bilinear")
    rows = planes.permute(0, 2, 3, 1)
    newlines = newline.to(rows).expand(*rows.shape[:2], 1, width)
    return torch.cat((rows, newlines), dim=2).flatten(1, 2)


class LlavaVideoModel(LlavaOnevisionModel):
    """OneVision's model, with LLaVA-Video's pooling of video frames."""

    config_class = LlavaVideoConfig

    def apply_pooling(self, image_features: Tensor) -> Tensor:
        """Pool video features [frames, 27 * 27, D] to [frames, 14 * 15, D] (or 13 * 14 if averaged); see `pool_frames`."""
        return pool_frames(image_features, self.image_newline, self.config.video_pooling)

    def get_video_features(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Return OneVision's features without their last newline, because every row of a frame already ends with one."""
        output = super().get_video_features(*args, **kwargs)
        output.pooler_output = output.pooler_output[:, :-1]
        return output


class LlavaVideoForConditionalGeneration(LlavaOnevisionForConditionalGeneration):
    """`LlavaVideoModel` with its output head."""

    config_class = LlavaVideoConfig

    def __init__(self, config: LlavaVideoConfig):
        LlavaOnevisionPreTrainedModel.__init__(self, config)
        self.model = LlavaVideoModel(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


class LlavaVideoProcessor(LlavaOnevisionProcessor):
    """OneVision's processor, with LLaVA-Video's number of placeholder tokens for a video."""

    def __init__(  # transformers reads the names of a processor's parts from here
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        video_processor: Any = None,
        num_image_tokens: int | None = None,
        vision_feature_select_strategy: str | None = None,
        chat_template: str | None = None,
        image_token: str = "<image>",
        video_token: str = "<video>",
        vision_aspect_ratio: str = "anyres_max_9",
        video_pooling: str = "bilinear",
        **kwargs: Any,
    ):
        self.video_pooling = video_pooling
        super().__init__(
            image_processor,
            tokenizer,
            video_processor,
            num_image_tokens=num_image_tokens,
            vision_feature_select_strategy=vision_feature_select_strategy,
            chat_template=chat_template,
            image_token=image_token,
            video_token=video_token,
            vision_aspect_ratio=vision_aspect_ratio,
            **kwargs,
        )

    def replace_video_token(self, video_inputs: dict, video_idx: int, **kwargs: Any) -> str:
        """Return the placeholder tokens of video number `video_idx`, as text."""
        frames = len(video_inputs["pixel_values_videos"][video_idx])
        return self.video_token * video_token_count(frames, math.isqrt(self.num_image_tokens), self.video_pooling)


def register() -> None:
    """Register the classes with transformers' Auto classes. May be called again."""
    AutoConfig.register(MODEL_TYPE, LlavaVideoConfig, exist_ok=True)
    AutoModelForImageTextToText.register(LlavaVideoConfig, LlavaVideoForConditionalGeneration, exist_ok=True)
    AutoProcessor.register(LlavaVideoConfig, LlavaVideoProcessor, exist_ok=True)
