"""Facts of model families that no config.json has, and rules for visual tokens.

A family is an instance of `Family`, or of a subclass with further rules, in the tuple `FAMILIES` of a file in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from mmkv_bench.errors import UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Settings = Mapping[str, Any]
"""`model.processor` of a configuration: see models/processor.py."""
Size = tuple[int, int]
"""Width and height in pixels."""
SIDES, TILES = "sides", "tiles"
OWN_FILES = "image sizes, pixel limits and tiles of the checkpoint's own processor files"


@dataclass(frozen=True)
class PixelLimits:
    """Pixel limits that a run sets (`model.min_pixels` and so on); None: the checkpoint's limit."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    video_max_pixels: int | None = None


NO_LIMITS = PixelLimits()


class Box(NamedTuple):
    """The rectangle of an image that a visual token shows.

    image: index of the image in the prompt. Edges: exact fractions of height and width, from the upper left corner.
    """

    image: int
    top: Fraction
    bottom: Fraction
    left: Fraction
    right: Fraction


class ImagePrompt(NamedTuple):
    """A prompt with images and no video. config: the whole model's. inputs: the processor's output. sizes: of the images."""

    config: Any
    processor: Any
    inputs: Mapping[str, Tensor]
    sizes: Sequence[Size]

    def tower_edge(self) -> int:
        """Return the side in pixels of the vision tower's input; raise UnsupportedError if the processor's output differs."""
        scaler, edge = self.processor.image_processor, self.config.vision_config.image_size
        edge = edge if isinstance(edge, int) else edge[0]
        processor_sides = {
            value for size in (scaler.size, getattr(scaler, "crop_size", None)) for value in dict(size or {}).values()
        }
        if processor_sides != {edge} or not scaler.do_resize:
            raise UnsupportedError(
                f"the image processor makes {dict(scaler.size)} (do_resize={scaler.do_resize}), but the vision tower "
                f"takes {edge} pixels, so visual tokens cannot be located; restore the {OWN_FILES}"
            )
        return edge


FULL, SLIDING, LINEAR, READER = "full_attention", "sliding_attention", "linear_attention", "dummy"
"""Kinds of layers, as transformers names them. Only full-attention layers are compressed. A READER layer stores nothing and reads
the keys and values of an earlier layer."""


@dataclass(frozen=True)
class States:
    """The layers of a text model that are not compressed, and how many numbers each of them stores per sequence.

    Attributes:
        windows: number of sliding layers.
        window: number of newest entries that a sliding layer keeps per KV head.
        entry: numbers in one token's keys and values in a sliding layer; 0: as many as in a compressed layer.
        readers: number of layers that store nothing and read another layer's keys and values.
        full_readers: number of `readers` that read a compressed layer.
        linear: number of recurrent layers.
        conv: numbers in a recurrent layer's convolution state, which has the model's dtype.
        recurrent: numbers in a recurrent layer's recurrent state, which is float32.
        weights: parameters of a recurrent layer's mixer; 0 if the family does not state them.
    """

    windows: int = 0
    window: int = 0
    linear: int = 0
    conv: int = 0
    recurrent: int = 0
    weights: int = 0
    entry: int = 0
    readers: int = 0
    full_readers: int = 0

    @property
    def layers(self) -> int:
        return self.windows + self.linear + self.readers

    def nbytes(self, tokens: int, entry: int, itemsize: int) -> int:
        """Return the bytes that all these layers store after a prompt of `tokens` tokens.

        Args:
            entry: numbers in one token's keys and values in one compressed layer.
            itemsize: bytes of a number in the model's dtype.
        """
        windows = self.windows * min(tokens, self.window) * (self.entry or entry) * itemsize
        return windows + self.linear_bytes(itemsize)

    def linear_bytes(self, itemsize: int) -> int:
        """Return the bytes that all recurrent layers store. itemsize: bytes of a number in the model's dtype."""
        return self.linear * (self.conv * itemsize + self.recurrent * 4)


NO_STATES = States()


@dataclass(frozen=True)
class Layer:
    """A group of layers of a text model that have the same shape.

    Attributes:
        count: number of these layers.
        matrices: matrix parameters of one layer that are multiplied with a token; only experts that the token is routed to count.
        vectors: parameters of norms and biases of one layer.
        queries: numbers in one token's queries, all heads together.
        near: whether the layers have sliding-window attention.
        reads: whether the layers read another layer's keys and values (see READER).
        idle: parameters of the experts of one layer that a token is not routed to.
    """

    count: int
    matrices: int
    vectors: int
    queries: int = 0
    near: bool = False
    reads: bool = False
    idle: int = 0


@dataclass(frozen=True)
class TextModel:
    """Facts of a text model (backbone) that a config.json may leave to the defaults of transformers' class.

    Attributes:
        model_type: `model_type` of the text config.
        qkv_bias: the projections of queries, keys and values always have biases.
        qk_norm: queries and keys are normalised per head.
        head_dim_follows: if config.json has no `head_dim`, the head dimension is hidden_size / num_attention_heads.
        window_switch: key of config.json that turns the sliding window off; None: there is no window.
        beside: kinds of layers besides full attention; these are not compressed.
        norms: number of norms of the model's width in a layer.
        gated: each query head has a gate of the head's width.
        sinks: each query head has a learned sink, which only eager attention supports.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim_follows: bool = True
    window_switch: str | None = None
    beside: tuple[str, ...] = ()
    norms: int = 2
    gated: bool = False
    sinks: bool = False

    def check(self, text: Any) -> None:
        """Raise UnsupportedError for attention that scorers do not reproduce, such as softcapped attention."""

    def states_all(self, text: Mapping[str, Any]) -> bool:
        """Tell whether a config.json has all keys that this class reads from a text config."""
        return True

    def kinds(self, text: Any) -> list[str]:
        """Return the kind of each layer (`full_attention`, ...), from the keys of a config.json."""
        return list(getattr(text, "layer_types", None) or [FULL] * text.num_hidden_layers)

    def shorten(self, text: dict[str, Any], cut: int) -> None:
        """Adapt the keys of a config.json, in place, after the last `cut` layers were left out."""

    def layers(self, text: Any, states: States) -> tuple[Layer, ...]:
        """Return the layers of a text config, grouped by shape; a further group may have shared parameters.

        states: the result of the method `states` for this config.
        """
        kv_heads, width = self.heads(text)
        queries, entries = text.num_attention_heads * width, kv_heads * width
        mlp, norms = 3 * text.hidden_size * text.intermediate_size, self.norms * text.hidden_size
        linear = Layer(states.linear, mlp + states.weights, norms)
        matrices = text.hidden_size * ((2 + self.gated) * queries + 2 * entries) + mlp
        biases = queries + 2 * entries if self.qkv_bias or getattr(text, "attention_bias", False) else 0
        vectors = norms + biases + 2 * width * self.qk_norm
        full_layers = Layer(text.num_hidden_layers - states.layers, matrices, vectors, queries)
        return tuple(
            one for one in (full_layers, replace(full_layers, count=states.windows, near=True), linear) if one.count
        )

    def rows(self, text: Any) -> int:
        """Count the parameters of further embedding tables. A token reads one row of each table."""
        return 0

    def states(self, text: Any, kinds: Sequence[str]) -> States:
        """Return the sizes of the layers that are not compressed. kinds: the kind of each layer."""
        if SLIDING not in kinds:
            return NO_STATES
        return States(windows=kinds.count(SLIDING), window=text.sliding_window - 1)

    def heads(self, text: Any) -> tuple[int, int]:
        """Return the number of KV heads of a compressed layer, and the width of a head."""
        query_heads: int = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // query_heads
        return getattr(text, "num_key_value_heads", None) or query_heads, width


@dataclass(frozen=True)
class Family:
    """Facts and rules of one model family.

    Attributes:
        model_type: `model_type` of config.json.
        name: the family's name in messages.
        text_models: the supported text models.
        model_class, processor, image_processor, video_processor: class names of transformers; None: the family takes no such
            media, or is a text model, whose processor is the tokenizer.
        image_id_key, video_id_key: keys of config.json for the ids of visual tokens.
        closing_id_key: key of config.json for the id of the token that follows the visual tokens of an image or video.
        closing_marker: text of this closing token, if only the tokenizer knows its id.
        pixel_limits: whether images are scaled to an area between two limits, which a run can change.
        whole_video_limit: whether the pixel limit of a video is for all frames together.
        equal_videos: whether the videos of one prompt need equally many frames.
        repeats_last_frame: whether the last frame of a video with fewer than `temporal_patch_size` frames is repeated.
        streams: whether a video can be prefilled in chunks, because the vision tower encodes temporal patches separately.
        smaller_by: how an image gets fewer tokens: `SIDES` (smaller sides), `TILES` (fewer tiles), None (not possible).
        classes_version: version of this project's model classes; None: transformers has the classes.
    """

    model_type: str
    name: str
    text_models: tuple[TextModel, ...]
    model_class: str
    processor: str | None = None
    image_processor: str | None = None
    video_processor: str | None = None
    image_id_key: str | None = None
    video_id_key: str | None = None
    closing_id_key: str | None = None
    closing_marker: str | None = None
    pixel_limits: bool = False
    whole_video_limit: bool = False
    equal_videos: bool = True
    repeats_last_frame: bool = False
    streams: bool = False
    smaller_by: str | None = None
    classes_version: int | None = None

    def __post_init__(self) -> None:
        for kind in self.media:
            if getattr(type(self), f"{kind}_tokens") is getattr(Family, f"{kind}_tokens"):
                raise TypeError(
                    f"{type(self).__name__} has a processor of {kind}s but no {kind}_tokens; define that method"
                )

    @property
    def media(self) -> tuple[str, ...]:
        """The media that a prompt can contain: `image`, `video`, both or none."""
        kinds = (("image", self.image_processor), ("video", self.video_processor))
        return tuple(kind for kind, processor in kinds if processor)

    def text_model(self, model_type: str) -> TextModel | None:
        """Return the supported text model with this `model_type`; None if there is none."""
        return next((text for text in self.text_models if text.model_type == model_type), None)

    # ------------------------------------------------------------------ visual tokens
    def image_tokens(self, settings: Settings, size: Size, images: int, limits: PixelLimits) -> int:
        """Count the visual tokens of one image in a prompt of `images` images; 0 for a model without images.

        Args:
            settings: keys of the checkpoint's processor, as in `model.processor`.
            size: width and height of the image in pixels.
            limits: pixel limits of the run.

        Raises UnsupportedError: one side is more than 200 times the other, and the family refuses such images.
        """
        return 0

    def video_tokens(self, settings: Settings, frames: int, size: Size, limits: PixelLimits) -> int:
        """Count the visual tokens of a video of `frames` >= 1 sampled frames; 0 for a model without videos.

        The other arguments and the error are those of `image_tokens`; size: of one frame.
        """
        return 0

    def boxes(self, prompt: ImagePrompt) -> list[Box | None]:
        """Return the box of each visual token of a prompt, in order; None for a token that shows no part of an image.

        Raises UnsupportedError: the processor's settings are not those that the rule assumes, or the family has no rule.
        """
        raise UnsupportedError(
            f"{self.model_type} models have no rule for the places of visual tokens; choose a model of another family"
        )

    def smaller_images(
        self, images: Sequence[Image], processor: Any, share: float
    ) -> tuple[list[Image], dict[str, Any]]:
        """Return images with fewer tokens, and keyword arguments for the image processor.

        Sides, or the largest number of tiles, are multiplied by `share` (0 < share <= 1) and rounded, to at least 1.
        """
        if self.smaller_by == TILES:
            image_processor = processor.image_processor
            max_patches = max(1, round(share * image_processor.max_patches))
            return list(images), {
                "max_patches": max_patches,
                "min_patches": min(image_processor.min_patches, max_patches),
            }
        from PIL.Image import Resampling

        sizes = [tuple(max(1, round(side * share)) for side in image.size) for image in images]
        scaled = [
            image.convert("RGB").resize((width, height), Resampling.BICUBIC)
            for image, (width, height) in zip(images, sizes, strict=True)
        ]
        return scaled, {}

    # ------------------------------------------------------------------ architecture
    def shrink_vision(self, values: dict[str, Any], layers: int) -> None:
        """Cut the vision tower of a config.json, in place, to at most `layers` layers; widths do not change."""
        vision = values["vision_config"]
        key = "depth" if "depth" in vision else "num_hidden_layers"
        depth = vision[key] = min(layers, vision[key])
        features = values.get("vision_feature_layer")
        if isinstance(features, int):  # an index into depth + 1 hidden states
            values["vision_feature_layer"] = min(features, depth) if features >= 0 else max(features, -(depth + 1))

    def register_classes(self) -> None:
        """Register this project's model classes with transformers' Auto classes, for models that transformers lacks."""

    def processor_class(self) -> Any:
        import transformers

        assert self.processor is not None
        return getattr(transformers, self.processor)


LLAMA = TextModel("llama")
MISTRAL = TextModel("mistral", window_switch="sliding_window")
QWEN2 = TextModel("qwen2", qkv_bias=True, window_switch="use_sliding_window")
QWEN3 = TextModel("qwen3", qk_norm=True, head_dim_follows=False, window_switch="use_sliding_window")
