"""Encode chat messages as the tensors that a model reads, with the model's processor and chat template."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mmkv_bench.compression.replay import NO_WORDS, ReplayText
from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.families.facts import ModelFacts, context_length, token_types
from mmkv_bench.families.registry import family_of_processor
from mmkv_bench.generation.processed_media import SharedMedia
from mmkv_bench.generation.video_inputs import frames_of, video_arguments
from mmkv_bench.models.chat_template import rendered, tokens_of
from mmkv_bench.models.video import DEFAULT_FRAMES
from mmkv_bench.protocols import Lengths, Protocol


@dataclass
class EncodedPrompt:
    """A prompt as the tensors that a model reads, with what is known about its tokens.

    Attributes:
        identity: dataset and sample id; seeds every random draw for the sample.
        inputs: the processor's tensors, batch dimension 1, without an all-ones attention mask.
        types: int `[1, T]`, 0 text, 1 image, 2 video.
        encode_s: seconds that encoding took.
        question_text_before_cut: number of tokens of message text before the last image or video.
        controls: control tokens that the messages contain as text.
        rendered: the prompt as text, written by the chat template; None for a prompt made from tokens.
        context_tokens: number of context tokens of a text prompt; None: the context ends after the visual tokens.
        template_tokens: number of tokens that the chat template puts after the last message's text; 0 if unknown.
        words: token ids to feed before and after the context when a scorer feeds the context again; else `NO_WORDS`.
        document: prompts of all questions about the same document; None if every protocol scores by the prompt's question only.
    """

    identity: str
    inputs: dict[str, Tensor]
    types: Tensor
    encode_s: float = 0.0
    question_text_before_cut: int = 0
    controls: tuple[str, ...] = ()
    rendered: str | None = None
    context_tokens: int | None = None
    template_tokens: int = 0
    words: ReplayText = NO_WORDS
    document: DocumentPrompts | None = None

    @property
    def input_ids(self) -> Tensor:
        return self.inputs["input_ids"]

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    @property
    def visual_tokens(self) -> int:
        return int((self.types > 0).sum())

    def to(self, device: torch.device) -> EncodedPrompt:
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, types=self.types.to(device))

    def context(self, length: int) -> EncodedPrompt:
        """Return the prompt cut to its first `length` tokens, which must include all visual tokens."""
        context_inputs = {
            name: tensor[:, :length] if tensor.ndim == 2 and tensor.shape == self.input_ids.shape else tensor
            for name, tensor in self.inputs.items()
        }
        return replace(self, inputs=context_inputs, types=self.types[:, :length])


@dataclass(frozen=True)
class DocumentPrompts:
    """Prompts of all questions about one document. All begin with the same context.

    Attributes:
        identity: dataset and document; seeds the random streams of a compression that belongs to no question.
        number: number of the current question, from 0.
        questions: one prompt per question.
        first: number of the question for which `query_first` compresses.
        generic: prompt with a fixed instruction in place of a question; None if there is none or no protocol needs it.
        paraphrases: prompt of each question in other words; empty if there are none or no protocol needs them.
        turns: for each question of `order` but the first, the tokens between the previous answer and its own answer, int64
            `[1, n]`. Empty unless the questions are turns of a conversation.
        waiting: numbers of the next questions that may be answered in one batch with the current question.
    """

    identity: str
    number: int
    questions: tuple[EncodedPrompt, ...]
    first: int
    generic: EncodedPrompt | None
    paraphrases: tuple[EncodedPrompt, ...]
    turns: tuple[Tensor, ...] = ()
    waiting: tuple[int, ...] = ()

    @property
    def order(self) -> list[int]:
        """Question numbers in the order of a conversation's turns."""
        return [(self.first + place) % len(self.questions) for place in range(len(self.questions))]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(prompt.length for prompt in self.questions)

    def scoring(self, rule: Protocol, context: int) -> tuple[EncodedPrompt, ...]:
        """Return the prompts that are prefilled to score the document's first `context` tokens under a protocol."""
        match rule.knows:
            case "first":
                return (self.questions[self.first],)
            case "joint":
                return self.questions
            case "generic" if self.generic is not None:
                return (self.generic,)
            case "paraphrase":
                return (self.paraphrases[self.number],)
        return (replace(self.questions[0].context(context), identity=self.identity),)

    def known(self, rule: Protocol) -> str:
        """Return the column `question_known` of a protocol: question numbers such as `0,1`, or the name `rule.knows`."""
        match rule.knows:
            case "first":
                return str(self.first)
            case "joint":
                return ",".join(str(number) for number in range(len(self.questions)))
        return rule.knows


def from_tensors(identity: str, inputs: dict[str, Tensor], family: ModelFacts, encode_s: float = 0.0) -> EncodedPrompt:
    """Return a processor's output for one sample as an `EncodedPrompt`.

    Raises:
        UnsupportedError: more than one row, or padding.
    """
    inputs = dict(inputs)
    mask = inputs.pop("attention_mask", None)
    inputs.pop("labels", None)  # some processors also make labels when nothing is trained
    if inputs["input_ids"].shape[0] != 1 or (mask is not None and not bool(mask.all())):
        raise UnsupportedError("prompts are encoded one at a time and without padding; give one sample")
    types = token_types(inputs["input_ids"], family)
    return EncodedPrompt(identity, inputs, types, encode_s)


def encode(
    processor,
    family: ModelFacts,
    identity: str,
    messages: Sequence[dict],
    images: Sequence = (),
    videos: Sequence = (),
    device: torch.device | str = "cpu",
    max_prompt_tokens: int | None = None,
    *,
    frames: int | None = None,
    video_max_pixels: int | None = None,
    share: float = 1.0,
    context: str = "",
    shared: SharedMedia | None = None,
    replays: bool = False,
) -> EncodedPrompt:
    """Encode messages and their media with the processor and its chat template.

    Args:
        messages: Hugging Face chat format; media are placeholders of type image or video, in the order of `images` and `videos`.
        videos: see `video_inputs.frames_of`; frames are sampled here, and the processor uses all of them.
        max_prompt_tokens: longest prompt that is allowed.
        frames: largest number of frames of a video; None: `DEFAULT_FRAMES`.
        video_max_pixels: largest number of pixels of one frame, for processors whose own limit is for the whole video.
        share: factor of the image size (see `Family.smaller_images`) and of the number of frames.
        context: the context of a prompt without media, as text; "" if no protocol separates context and question.
        shared: reuses the processed media of an earlier prompt with the same media.
        replays: fill `words`, because a scorer will feed the context again (`Needs.replay`).

    Raises:
        UnsupportedError: a prompt longer than `max_prompt_tokens` or the model's context, media that the family does
            not take, or a text that contains a media marker.
        DataError: media and placeholders differ in number, or a video cannot be decoded.
    """
    start = time.perf_counter()
    _check_counts(processor, family, messages, images, videos)
    text = rendered(processor, messages)
    _check_markers(processor, text, len(images), len(videos))

    def read() -> dict[str, Any]:
        media: dict[str, Any] = {}
        used_images = images
        if len(images) and share < 1:
            used_images, media["images_kwargs"] = family.rules.smaller_images(images, processor, share)
        if len(images):
            media["images"] = _images(processor, used_images)
        if len(videos):
            max_frames = max(1, round(share * (frames or DEFAULT_FRAMES)))
            sampled = [frames_of(video, max_frames) for video in videos]
            media |= video_arguments(processor, sampled, video_max_pixels)
        return media

    if shared is None:
        inputs = _tensors(processor, text, read())
    else:
        inputs = _tensors(shared.processor, text, shared.media(read))
    tensors = {name: value.to(device) for name, value in inputs.items() if isinstance(value, Tensor)}
    prompt = from_tensors(identity, tensors, family, time.perf_counter() - start)
    tokenizer = getattr(processor, "tokenizer", processor)
    prompt.rendered, prompt.controls = text, _controls(messages, tokenizer)
    prompt.question_text_before_cut = _text_before_media(messages, tokenizer)
    prompt.template_tokens = _template_tokens(text, messages, tokenizer, prompt.input_ids)
    if replays:
        prompt.words = _words(processor, text, messages, prompt)
    if context and not images and not videos:
        prompt.context_tokens = _context_tokens(processor, text, context, prompt.input_ids)
    if max_prompt_tokens is not None and prompt.length > max_prompt_tokens:
        raise UnsupportedError(
            f"the prompt of {identity} has {prompt.length} tokens, more than model.max_prompt_tokens="
            f"{max_prompt_tokens}; raise the limit{_shorter(processor, images, videos)}"
        )
    if family.max_context is not None and prompt.length > family.max_context:
        raise UnsupportedError(
            f"the prompt of {identity} has {prompt.length} tokens, more than the model's context of "
            f"{family.max_context}; leave this sample out{_shorter(processor, images, videos)}"
        )
    return prompt


def _context_tokens(processor, text: str, context: str, input_ids: Tensor) -> int | None:
    """Return the number of tokens of a rendered prompt up to the end of `context`; None if the prompt lacks this text.

    A token that spans the end of the context, or that depends on the text after it, belongs to the question.
    """
    start = text.find(context)
    if start < 0:
        return None
    ids_of_beginning = _tensors(processor, text[: start + len(context)], {})["input_ids"][0].tolist()
    pairs = zip(ids_of_beginning, input_ids[0].tolist(), strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(len(ids_of_beginning), input_ids.shape[1]),
    )


def prompt_length(processor, messages: Sequence[dict], images: Sequence = ()) -> int:
    """Return the number of tokens that `encode` gives for messages with images, with the same errors for media markers."""
    text = rendered(processor, messages)
    _check_markers(processor, text, len(images), 0)
    media = {"images": _images(processor, images)} if len(images) else {}
    return _tensors(processor, text, media)["input_ids"].shape[1]


def _tensors(processor, text: str, media: Mapping[str, Any]) -> Mapping[str, Any]:
    if hasattr(processor, "image_processor") or media:
        return processor(text=[text], return_tensors="pt", **media, **tokens_of(processor, text))
    return processor([text], return_tensors="pt", **tokens_of(processor, text))


def _parts(messages: Sequence[dict]) -> list[dict]:
    contents = [message["content"] for message in messages]
    texts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    return [part for parts in texts for part in parts]


def _check_counts(processor, family: ModelFacts, messages: Sequence[dict], images: Sequence, videos: Sequence) -> None:
    parts = _parts(messages)
    for kind, given in (("image", images), ("video", videos)):
        placeholder_count = sum(part["type"] == kind for part in parts)
        if placeholder_count != len(given):
            raise DataError(
                f"the messages have {placeholder_count} placeholders for {kind}s, but {len(given)} {kind}s were given; give "
                f"as many {kind}s as placeholders"
            )
        if given and getattr(processor, f"{kind}_processor", None) is None:
            raise UnsupportedError(f"{family.name} takes no {kind}s; choose a model of a family that does")


def _shorter(processor, images: Sequence, videos: Sequence) -> str:
    """Return advice on how to shorten a prompt, as the end of a sentence; "" if no setting shortens the prompt."""
    family = family_of_processor(processor)
    by_area = family is not None and family.pixel_limits
    token_limit_keys = ["model.max_pixels"] * (by_area and len(images) > 0) + ["model.frames"] * (len(videos) > 0)
    token_limit_keys += ["model.video_max_pixels"] * (by_area and len(videos) > 0)
    if not images and not videos:
        return ", or cut the text with dataset.generation.cut_prompt=middle"
    return f", or lower {' or '.join(token_limit_keys)}" if token_limit_keys else ""


def _check_markers(processor, text: str, images: int, videos: int) -> None:
    """Raise UnsupportedError unless the rendered prompt has one media marker (such as `<image>`) per image and video."""
    for kind, wanted in (("image", images), ("video", videos)):
        marker = getattr(processor, f"{kind}_token", None)
        count = text.count(marker) if marker else wanted
        if count != wanted:
            remedy = (
                "the question contains this marker; change the text, or set "
                "datasets.<name>.placeholders=interleave or remove"
                if count > wanted
                else "the chat template leaves markers out; correct the template"
            )
            raise UnsupportedError(
                f"the prompt has {wanted} {kind}s but {count} times {marker}, the marker of "
                f"{type(processor).__name__} for {kind}s; {remedy}"
            )


def _images(processor, images: Sequence) -> list:
    """Return images in the form that the processor takes.

    LLaVA-OneVision's processor counts images per prompt and gets one list per prompt. This processor cuts a single image into
    tiles, but does not cut several images, as in the model's training.
    """
    per_prompt = "batch_num_images" in getattr(processor.image_processor, "model_input_names", ())
    return [list(images)] if per_prompt else list(images)


def _text_before_media(messages: Sequence[dict], tokenizer) -> int:
    """Count the tokens of message text, without template and markers, before the last image or video."""
    parts = _parts(messages)
    last_media = max((i for i, part in enumerate(parts) if part["type"] in ("image", "video")), default=-1)
    texts = [part["text"] for part in parts[: last_media + 1] if part["type"] == "text" and part["text"]]
    return sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def _template_tokens(text: str, messages: Sequence[dict], tokenizer, input_ids: Tensor) -> int:
    """Count the tokens that the chat template puts after the last message's text; 0 if unknown. text: the rendered prompt."""
    stripped_texts = [
        part["text"].strip() for part in _parts(messages) if part["type"] == "text" and part["text"].strip()
    ]
    if not stripped_texts or stripped_texts[-1] not in text:
        return 0
    ids_after_text = tokenizer(
        text[text.rindex(stripped_texts[-1]) + len(stripped_texts[-1]) :], add_special_tokens=False
    )["input_ids"]
    return (
        len(ids_after_text) if ids_after_text and input_ids[0, -len(ids_after_text) :].tolist() == ids_after_text else 0
    )


WHOLE = "\n\nRepeat the previous context exactly."
PART = "\n\nRepeat the part of the previous context exactly, starting with "
"""Instructions of KVzip (arXiv 2505.23416)."""


def _words(processor, text: str, messages: Sequence[dict], prompt: EncodedPrompt) -> ReplayText:
    """Return the token ids to feed before and after the context when it is fed again. text: the rendered prompt."""
    tokenizer, ids = getattr(processor, "tokenizer", processor), prompt.input_ids[0].tolist()
    parts = _parts([message for message in messages if message["role"] != "system"])
    texts = [part["text"].strip() if part["type"] == "text" else _marker(processor, part["type"]) for part in parts]
    part_starts = [place for word in texts if word and (place := text.find(word)) >= 0]
    head = tokenizer(text[: min(part_starts, default=0)], add_special_tokens=False)["input_ids"]
    offset = 0 if ids[:1] == head[:1] or not head else 1  # the tokenizer puts a token before every text
    matches = [one == other for one, other in zip(head, ids[offset:], strict=False)]
    prefix = offset + (matches.index(False) if False in matches else len(matches)) if head else 0
    whole_instruction, part_instruction = _instructions(tokenizer)
    return ReplayText(prefix, whole_instruction, part_instruction, tuple(ids[len(ids) - prompt.template_tokens :]))


@lru_cache(maxsize=1)
def _instructions(tokenizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in (WHOLE, PART))


def _marker(processor, kind: str) -> str | None:
    marker: str | None = getattr(processor, f"{kind}_token", None)
    return marker


def _controls(messages: Sequence[dict], tokenizer) -> tuple[str, ...]:
    controls = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = [part["text"] for part in _parts(messages) if part["type"] == "text"]
    return tuple(sorted(token for token in controls if any(token in text for text in texts)))


def _cut(prompt: EncodedPrompt, family: ModelFacts) -> int:
    """Return the number of context tokens, for protocols that separate context and question."""
    return context_length(prompt.input_ids[0], family) if prompt.context_tokens is None else prompt.context_tokens


def same_context(prompts: Sequence[EncodedPrompt], family: ModelFacts) -> None:
    """Raise DataError if the prompts of a document's questions do not begin with the same context tokens."""
    context_ends = [_cut(prompt, family) for prompt in prompts]
    contexts = [prompt.input_ids[0, :cut].tolist() for prompt, cut in zip(prompts, context_ends, strict=True)]
    if any(context != contexts[0] for context in contexts):
        raise DataError(
            f"the questions about the document of {prompts[0].identity} change the tokens of its context ({context_ends} "
            "tokens); every question has to come after the whole context"
        )


def lengths_of(protocol: Protocol, prompt: EncodedPrompt, family: ModelFacts) -> Lengths:
    """Return a prompt's lengths in tokens under a protocol.

    Raises:
        UnsupportedError: the prompt has neither visual tokens nor a known context, no question follows the context, or a visual
            token would be fed again.
    """
    context_end = _cut(prompt, family) if protocol.cuts else None
    if context_end is not None and context_end >= prompt.length:
        raise UnsupportedError(
            f"{prompt.identity} ends with its context; protocol={protocol.name} needs a question after it"
        )
    lengths = protocol.lengths(prompt.length, context_end)
    if bool((prompt.types[0, lengths.candidates :] > 0).any()):
        raise UnsupportedError(
            f"{prompt.identity} ends with a visual token, which protocol={protocol.name} cannot feed again; put text after "
            "it, or use protocol=paper"
        )
    return lengths


def turn_tokens(processor, messages: Sequence[dict], question: str) -> Tensor:
    """Return the token ids between two answers of a conversation, int64 `[1, n]`: chat template and next question.

    Args:
        messages: the prompt, in Hugging Face's chat format.
        question: the user's next turn.

    Raises:
        DataError: the template does not put an unchanged answer right after the prompt.
    """
    answer, prompt = "A", rendered(processor, messages)
    answer_message = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    conversation = rendered(
        processor, [*messages, answer_message, {"role": "user", "content": [{"type": "text", "text": question}]}]
    )
    text_after_prompt = conversation.removeprefix(prompt)
    leading_spaces = len(text_after_prompt) - len(text_after_prompt.lstrip())
    if text_after_prompt == conversation or not text_after_prompt.startswith(answer, leading_spaces):
        raise DataError(
            "the chat template does not put an earlier answer right after its prompt, so the tokens of a further "
            f"turn are unknown; it gives {conversation[-200:]!r} where the prompt ends in {prompt[-100:]!r}; use another "
            "protocol"
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    return torch.tensor(
        [tokenizer(text_after_prompt[leading_spaces + len(answer) :], add_special_tokens=False)["input_ids"]],
        dtype=torch.int64,
    )


def reference_tokens(
    processor, messages: Sequence[dict], reference: str, continuation: bool = False
) -> tuple[int, ...]:
    """Return the token ids that the model would generate to give a dataset's reference answer.

    The chat template renders prompt and answer together. A space or newline between the two belongs to the answer. Tokens that
    the template adds after the answer are left out.

    Args:
        messages: the prompt, in Hugging Face's chat format.
        continuation: append the reference to the rendered prompt, without an assistant's turn.

    Raises:
        DataError: the reference is empty, is not rendered unchanged right after the prompt, or shares a token with the prompt.
    """
    answer = reference.strip()
    if not answer:
        raise DataError("the reference answer is empty; give one, or take ppl out of the dataset's measures")
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    prompt = rendered(processor, messages)
    conversation = prompt + answer if continuation else rendered(processor, [*messages, turn], answering=False)
    text_after_prompt = conversation.removeprefix(prompt)
    leading_spaces = len(text_after_prompt) - len(text_after_prompt.lstrip())
    if text_after_prompt == conversation or not text_after_prompt.startswith(answer, leading_spaces):
        raise DataError(
            "the chat template does not render the reference answer right after the prompt, so the answer's "
            f"tokens are unknown; it gives {conversation[-200:]!r} where the prompt ends in {prompt[-100:]!r}"
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    prompt_ids, all_ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, prompt + text_after_prompt[: leading_spaces + len(answer)])
    )
    if all_ids[: len(prompt_ids)] != prompt_ids or len(all_ids) == len(prompt_ids):
        raise DataError(
            "the tokenizer joins the end of the prompt with the beginning of the reference answer, so the answer "
            "has no tokens of its own; take ppl out of the dataset's measures"
        )
    return tuple(all_ids[len(prompt_ids) :])
