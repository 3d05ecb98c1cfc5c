"""Sessions, which attach a compressor to an unmodified Hugging Face model.

A session uses three public extension points: a registered attention function, cache layers of this package, and module
hooks. It replaces nothing in a library. After the ``with`` block the model is exactly as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias

import torch
from torch import Tensor

from mmkv_bench.compression import flash, states
from mmkv_bench.compression.attended_prefix import check_start, reach_of
from mmkv_bench.compression.attention_backend import LAYER, READS, SESSIONS, Attention, register, sinks_of
from mmkv_bench.compression.budget import Budget
from mmkv_bench.compression.cache import DEFAULT_RESERVE, CompressedCache, CompressedLayer
from mmkv_bench.compression.compressor import Compressor
from mmkv_bench.compression.fixed_layer import FixedLayer, fix, pool_of
from mmkv_bench.compression.listeners import AnswerAttention, Phases, PrefillListener, untimed
from mmkv_bench.compression.observation import Chunk, Needs, Observation, PromptBatch, Received
from mmkv_bench.compression.replay import Replay, ReplayText
from mmkv_bench.compression.streaming import StreamListener
from mmkv_bench.compression.varlen_layer import VarlenLayer, folds
from mmkv_bench.errors import ConfigError, UnsupportedError
from mmkv_bench.protocols import DEFAULT
from mmkv_bench.protocols import Protocol as ProtocolRule
from mmkv_bench.protocols import protocol as protocol_named

if TYPE_CHECKING:
    from transformers import PreTrainedModel


UNNAMED = "prompt"
"""Identity of a prompt without a name: random streams then differ only by seed and length."""

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
"""A forward's arguments, as hooks receive them."""


class Listener(Protocol):
    """Receiver of the observations of each layer of a prompt, such as `PrefillListener`, which compresses the layers."""

    needs: Needs

    def layer_done(self, prompt: PromptBatch, layer: int, observations: list[Observation]) -> None: ...

    def prompt_done(self, prompt: PromptBatch) -> None: ...

    def kept(self) -> list[Tensor]: ...


class Session:
    """Hooks on one model, as a context manager. A session prefills one batch of prompts at a time.

    Args:
        model: any supported `...ForConditionalGeneration` or causal language model, in eval mode.
        listener: called after each layer, and after the last layer, of a prefill; None observes nothing.
        prompt_length: padded length of the next prompt. Needed only for chunked prefill; otherwise the first forward on
            an empty cache is the whole prompt.
        token_types: int `[B, T]` of the next prompt (0 text, 1 image, 2 video); derived from the input ids when None.
        identity: one name per row (dataset and sample id) that seeds the random streams.
        attention: `sdpa`, `eager` or `flash_attention_2`; the model's own when None.
        reserve: slots of slack for new tokens.
        fixed: caches keep their capacity after the prefill, so that a decode step can be compiled
            (`compression/fixed_layer.py`); `reserve` then limits the answer. No effect while `answer` is set.
        packs: heads of different lengths may be stored back to back, without padding, if the device can read them so
            (`compression/varlen_layer.py`). Set False to decode from a fixed view of the cache. No effect with
            attention=eager.

    Raises:
        UnsupportedError: layers that `states.py` does not support, an attention implementation that cannot be wrapped,
            fused projections, settings that flash-attn does not support.
        ConfigError: flash-attn is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        listener: Listener | None = None,
        *,
        prompt_length: int | None = None,
        token_types: Tensor | None = None,
        identity: str | Sequence[str] = UNNAMED,
        attention: str | None = None,
        reserve: int = DEFAULT_RESERVE,
        fixed: bool = False,
        packs: bool = True,
    ):
        self.fixed = fixed
        self.model, self.listener = model, listener
        self.text = model.get_decoder() if hasattr(model, "get_decoder") else model.model.language_model
        self.kinds = states.check_layers(type(model).__name__, self.text.config)[: len(self.text.layers)]
        self.full = [i for i, kind in enumerate(self.kinds) if kind == states.FULL]
        self.attentions = [self.text.layers[i].self_attn for i in self.full]
        self.readers = {i: j for i, j in states.readers(self.text.config).items() if i < len(self.kinds)}
        self.prompt_length, self.token_types, self.identity = prompt_length, token_types, identity
        self.base, self.reserve = attention or self.text.config._attn_implementation, reserve
        self.prompt: PromptBatch | None = None
        self.cache: CompressedCache | None = None
        self.answer: AnswerAttention | None = None  # if set, collects what is fed after the prefill
        self.position_ids: Tensor | None = None  # of the latest forward, as the text model received them
        self._calls: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
        self._top: dict[str, Tensor | None] = {}
        self._check(packs)

    @property
    def has_states(self) -> bool:
        """True if some layers have a window or a recurrent state, which is not compressed."""
        return len(self.full) < len(self.kinds)

    def check_method(self, compressor: Compressor, rule: ProtocolRule) -> None:
        """Raise UnsupportedError if the method or protocol cannot run beside the model's sliding or recurrent layers."""
        if self.has_states:
            compressor.check_beside_states(type(self.model).__name__, rule, bool(self.readers))

    def _check(self, packs: bool) -> None:
        if self.has_states and (self.fixed or self.base == flash.FLASH):
            setting_text = "decode=compiled" if self.fixed else f"attention={self.base}"
            raise UnsupportedError(
                f"{type(self.model).__name__} has {states.SLIDING} or {states.LINEAR} layers, which do not "
                f"support {setting_text}; allowed for this model: decode=eager, attention=sdpa or eager"
            )
        for module in self.attentions:
            if not all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", "layer_idx")):
                raise UnsupportedError(
                    f"{type(module).__name__} has no separate query, key and value projections; choose a model that "
                    "has them"
                )
            if getattr(module, "attn_logit_softcapping", None) is not None:
                raise UnsupportedError(
                    f"{type(module).__name__} caps its scores (softcapping), which no scorer supports; allowed: a "
                    "plain softmax over keys; choose another model"
                )
            if sinks_of(module) is not None and self.base != "eager":
                raise UnsupportedError(
                    f"{type(module).__name__} has learned sinks, which attention={self.base} does not support; "
                    "choose attention=eager"
                )
        weight = self.attentions[0].q_proj.weight
        flash.check(self.base, weight.device, weight.dtype, self.fixed)
        width = self.attentions[0].head_dim
        if self.base == flash.FLASH:
            flash.check_head(width)
        self._packs = packs and not self.readers and self.base != "eager" and folds(weight.device, weight.dtype, width)

    # ------------------------------------------------------------------ context
    def __enter__(self) -> Self:
        if any(module in SESSIONS for module in self.attentions):
            raise ConfigError("this model already has a session attached; leave it before attaching another")
        name = register(self.base)
        self._stock = self.text.config._attn_implementation
        self._set_implementation(name)
        self._hooks = [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self.text.register_forward_pre_hook(self._before_text, with_kwargs=True),
            self.text.register_forward_hook(self._after_text, with_kwargs=True),
        ]
        for module in self.attentions:
            SESSIONS[module] = self
            self._hooks.append(module.register_forward_pre_hook(self._before_attention, with_kwargs=True))
        for i in self.readers:
            module = self.text.layers[i].self_attn
            self._hooks.append(module.register_forward_pre_hook(self._before_reader, with_kwargs=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self.attentions:
            SESSIONS.pop(module, None)
        self._set_implementation(self._stock)
        self.prompt = None
        self._calls.clear()
        self._top.clear()

    def _set_implementation(self, name: str) -> None:
        # A dict leaves the vision tower alone; a plain language model ignores the dict form and wants the string.
        alone = self.model.config is self.text.config
        self.model.set_attn_implementation(name if alone else {"text_config": name})

    def expect(self, listener: Listener | None, token_types: Tensor | None, identity: str | Sequence[str]) -> None:
        """Set listener, token types and identity of the next prompt."""
        self.listener, self.token_types, self.identity, self.prompt = listener, token_types, identity, None

    def observe_turn(self, listener: Listener, cache: CompressedCache, total: int, identity: str, turn: int) -> None:
        """Observe the next tokens of one sequence, fed after its stored entries, until `total` tokens have been seen.

        turn: index of the conversation's turn.
        """
        self.expect(listener, None, identity)
        self.cache, self._forgotten = cache, 0
        self.prompt = PromptBatch(total, [0], cache, len(self.attentions), turn=turn)

    def observe_rest(
        self, listener: Listener, context: PromptBatch, total: int, types: Tensor, identity: str | Sequence[str]
    ) -> None:
        """Observe the rest of a prompt whose beginning, the context, was observed before and is still in the cache.

        Args:
            context: the session's `prompt` after the context was fed, as the first chunk of a longer prompt.
            total: tokens of the whole prompt.
            types: int `[1, total]`.
        """
        self.expect(listener, types, identity)
        self.cache, self._forgotten = context.cache, 0
        self.prompt = replace(context, total=total, token_types=types, observations={}, rotations={}, context=context)

    # ------------------------------------------------------------------ hooks
    # A fixed cache is not observed: a compiled step traces these hooks, so nothing in them may change from step to step.
    def _before_model(self, model: object, args: Args, kwargs: Kwargs) -> None:
        if _is_fixed(kwargs):
            return
        self._top = {"input_ids": kwargs.get("input_ids"), "attention_mask": kwargs.get("attention_mask")}
        if args:
            self._top["input_ids"] = args[0]

    def _before_text(self, text: object, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        if _is_fixed(kwargs):
            return args, kwargs
        cache = kwargs.get("past_key_values")
        # a compressed prompt of one token is empty again under strict, and still the same prompt
        reopened = self.prompt is not None and self.prompt.complete and cache is self.prompt.cache
        starts_prompt = (cache is None or cache.get_seq_length() == 0) and not reopened
        if starts_prompt and self.listener is not None and kwargs.get("use_cache") is not False:
            if not isinstance(cache, CompressedCache):
                cache = self.new_cache()
                kwargs = dict(kwargs, past_key_values=cache)
            self._start_prompt(cache, args, kwargs)
            self._add_reach(kwargs)
            if self.listener.needs.replay:
                self._receive(args, kwargs)
        elif self.prompt is not None and not self.prompt.complete and cache is self.prompt.cache:
            self._add_types(self._new_tokens(args, kwargs))
            self._add_reach(kwargs)
            self.prompt.rotations.clear()  # they belong to the previous chunk
        if isinstance(cache, CompressedCache) and cache.query_positions is not None:
            kwargs = dict(kwargs, position_ids=cache.query_positions(cache, kwargs["position_ids"]))
        self.position_ids = kwargs.get("position_ids")
        return args, kwargs

    def _before_attention(self, module: Attention, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, CompressedCache):
            return None
        layer: CompressedLayer = cache.layers[module.layer_idx]
        if not layer.fixed:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self._calls[module.layer_idx] = (hidden, kwargs["position_embeddings"])
        return args, {**kwargs, LAYER: layer}

    def _before_reader(self, module: Attention, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, CompressedCache):
            return None
        return args, {**kwargs, LAYER: cache.layers[self.readers[module.layer_idx]], READS: True}

    def _after_text(self, text: object, args: Args, kwargs: Kwargs, output: object) -> None:
        if _is_fixed(kwargs):
            return
        self._calls.clear()
        prompt = self.prompt
        if prompt is None or prompt.complete or prompt.cache.get_seq_length() + self._forgotten < prompt.total:
            return
        prompt.complete = True  # what is fed from here on is not part of it
        positions = self.position_ids
        self._active_listener.prompt_done(prompt)
        self.position_ids = positions
        prompt.observations.clear()
        prompt.rotations.clear()
        if prompt.cache.is_compileable:
            fix(prompt.cache, pool_of(self.model), prompt.pads)

    # ------------------------------------------------------------------ one prompt
    def new_cache(self, reserve: int | None = None) -> CompressedCache:
        """Return an empty cache for one prompt.

        A fixed cache must be passed to `generate(past_key_values=...)`, which decides before the prefill whether it
        compiles. Without `fixed`, the first forward makes the cache itself.
        """
        kind: type[CompressedLayer] = VarlenLayer if self._packs else CompressedLayer
        if self.fixed and self.answer is None:
            kind = FixedLayer
        slots = self.reserve if reserve is None else reserve
        return CompressedCache.of(
            [
                kind(slots) if name == states.FULL else states.state_layer(self.text.config, i)
                for i, name in enumerate(self.kinds)
            ]
        )

    @staticmethod
    def _new_tokens(args: Args, kwargs: Kwargs) -> int:
        embeds = kwargs.get("inputs_embeds")
        fed: Tensor = args[0] if embeds is None and args else kwargs["input_ids"] if embeds is None else embeds
        return fed.shape[1]

    def _start_prompt(self, cache: CompressedCache, args: Args, kwargs: Kwargs) -> None:
        new_tokens = self._new_tokens(args, kwargs)
        embeds = kwargs.get("inputs_embeds")
        rows = (embeds if embeds is not None else args[0] if args else kwargs["input_ids"]).shape[0]
        mask = self._top.get("attention_mask")
        if mask is None:
            mask = kwargs.get("attention_mask")
        pads = [0] * rows
        if cache.is_compileable:  # generate() has made the layers' mask already; its last query sees all but padding
            mask = mask.get("full_attention") if isinstance(mask, dict) else mask
            if isinstance(mask, Tensor) and mask.ndim == 4:
                mask = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
        if isinstance(mask, Tensor) and mask.ndim == 2:
            real = mask[:, :new_tokens].bool()
            pads = (~real).int().cumprod(-1).sum(-1).tolist()
            if bool((real.sum(-1) + torch.tensor(pads, device=real.device) != real.shape[1]).any()):
                raise UnsupportedError("the attention mask has gaps or right padding; pad prompts on the left")
        total = self.prompt_length or new_tokens
        self.cache, self._forgotten = cache, 0
        self.prompt = PromptBatch(total, pads, cache, len(self.attentions))
        if self.token_types is not None:
            self.prompt.token_types = self.token_types
        else:
            self._add_types(new_tokens)

    def _receive(self, args: Args, kwargs: Kwargs) -> None:
        """Store the arguments of the text model, so that the prompt can be fed again."""
        assert self.prompt is not None, "it has just been started"
        embeds = kwargs.get("inputs_embeds")
        if embeds is None:
            embeds = self.text.get_input_embeddings()(args[0] if args else kwargs["input_ids"])
        visual = (kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds"))
        self.prompt.received = Received(embeds, kwargs.get("position_ids"), *visual)

    def _add_types(self, new: int) -> None:
        """Derive the token types of the newest chunk from the input ids, unless the caller gave types."""
        ids, prompt = self._top.get("input_ids"), self.prompt
        if self.token_types is not None or ids is None or prompt is None:
            return
        config, ids = self.model.config, ids[:, -new:]
        types = torch.zeros_like(ids)
        for value, name in ((1, "image_token_id"), (2, "video_token_id")):
            token = getattr(config, name, None)
            if token is not None:
                types[ids == token] = value
        prompt.token_types = types if prompt.token_types is None else torch.cat([prompt.token_types, types], 1)

    def _add_reach(self, kwargs: Kwargs) -> None:
        prompt = self.prompt
        assert prompt is not None, "it is being prefilled"
        prompt.reach = reach_of(kwargs.get("attention_mask"), prompt.token_types, prompt.pads)
        prompt.two_way |= prompt.reach is not None
        if prompt.two_way:
            check_start(prompt.token_types, prompt.cache.get_seq_length())

    @property
    def _active_listener(self) -> Listener:
        assert self.listener is not None, "a prompt is started for a listener"
        return self.listener

    def after_attention(self, module: Attention, query: Tensor, layer: CompressedLayer) -> None:
        """Observe one layer's part of a prompt chunk. The attention function calls this method with the rotated queries."""
        prompt, index = self.prompt, self.full.index(module.layer_idx)  # scorers and listeners count compressed layers
        if self.answer is not None and (prompt is None or prompt.complete):
            self.answer.add(index, query, layer.keys, module.scaling, sinks_of(module))
        if prompt is None or prompt.complete or prompt.cache.layers[module.layer_idx] is not layer:
            return
        # popped, or the inputs of all layers would stay until the end of the prefill
        hidden, (cos, sin) = self._calls.pop(module.layer_idx)
        cos, sin = self._full_width_rope(cos, sin)
        if index not in prompt.observations:
            prompt.observations[index] = [self._observation(prompt, module, row) for row in range(len(prompt.pads))]
            if prompt.context is not None:
                prompt.observations[index][0].copy_statistics(prompt.context.observations[index][0])
            if prompt.turn:
                prompt.observations[index][0].start_after_entries(layer.stored - query.shape[2], prompt.turn)
        start = layer.seen - query.shape[2]
        for row, (pad, observation) in enumerate(zip(prompt.pads, prompt.observations[index], strict=True)):
            skip = min(max(pad - start, 0), query.shape[2])  # padding inside this chunk
            if skip == query.shape[2]:
                continue
            rope = row if cos.shape[0] > 1 else 0
            observation.observe(
                Chunk(
                    query=query[row, :, skip:],
                    key=layer.keys[row, :, pad:],
                    value=layer.values[row, :, pad:],
                    hidden=hidden[row, skip:],
                    cos=cos[rope, skip:],
                    sin=sin[rope, skip:],
                    reach=None if prompt.reach is None else prompt.reach[row, skip:] - pad,
                )
            )
        seen = layer.seen
        if isinstance(self.listener, StreamListener) and self.listener.is_full(layer):
            self.listener.layer_full(prompt, index, prompt.observations[index][0])
        if seen >= prompt.total:
            for row, observation in enumerate(prompt.observations[index]):
                if prompt.token_types is not None:
                    observation.token_types = prompt.token_types[row, prompt.pads[row] :]
            self._active_listener.layer_done(prompt, index, prompt.observations[index])
            # a policy's layer may have taken its place
            self._forgotten = seen - prompt.cache.layers[module.layer_idx].seen
            prompt.observations[index] = []  # frees the layer's queries and moments

    def _observation(self, prompt: PromptBatch, module: Attention, row: int) -> Observation:
        identity = self.identity if isinstance(self.identity, str) else self.identity[row]
        if isinstance(self.identity, str) and len(prompt.pads) > 1:
            identity = f"{identity}/{row}"

        def project_query(hidden: Tensor) -> Tensor:
            query: Tensor = module.q_proj(hidden.to(module.q_proj.weight.dtype))
            # Qwen3.5's projection appends a gate to each head's query.
            query = query.view(hidden.shape[0], self.text.config.num_attention_heads, -1)[..., : module.head_dim]
            norm = getattr(module, "q_norm", None)
            return (query if norm is None else norm(query)).transpose(0, 1)

        def future_rope(offsets: Tensor) -> tuple[Tensor, Tensor]:
            name = (row, *offsets.tolist())
            if name not in prompt.rotations:
                prompt.rotations[name] = self._future_rope(prompt, row, offsets)
            return prompt.rotations[name]

        return Observation(
            self.full.index(module.layer_idx),
            len(self.attentions),
            self._active_listener.needs,
            scaling=module.scaling,
            length=prompt.length(row),
            token_types=None,
            project_query=project_query,
            future_rope=future_rope,
            identity=identity,
            module=module,
            sinks=sinks_of(module),
        )

    def _full_width_rope(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin `[..., R]` for all R rotated dimensions; gpt-oss's model gives only R / 2 values, to be repeated."""
        frequencies = getattr(self.text.rotary_emb, "inv_freq", None)
        if frequencies is None or cos.shape[-1] != len(frequencies):
            return cos, sin
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)

    def _future_rope(self, prompt: PromptBatch, row: int, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin `[m, D]` of the positions that are `offsets` `[m]` after the last token of a row."""
        positions = self.position_ids
        if positions is None:
            last_position = torch.full((1, 1), prompt.total - 1, device=self.attentions[0].q_proj.weight.device)
        else:
            positions = positions[1:] if positions.ndim == 3 and positions.shape[0] == 4 else positions
            last_position = positions[..., min(row, positions.shape[-2] - 1), -1:].unsqueeze(-2)
        return self.rope((last_position + offsets.to(last_position)).squeeze(-2))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos, sin `[n, D]`, float32, of position ids `[n]` or `[axes, n]` in compressed layers."""
        rotary, axes = self.text.rotary_emb, torch.atleast_2d(positions)
        if len(axes) == 1 and getattr(rotary, "mrope_section", None) is not None:
            axes = axes.expand(3, -1)
        dtype_probe = torch.zeros(1, dtype=torch.float32, device=positions.device)
        kinds = [states.FULL] if hasattr(rotary, "layer_types") else []  # Gemma's has one embedding per kind of layer
        cos, sin = rotary(dtype_probe, axes if len(axes) == 1 else axes[:, None], *kinds)
        return self._full_width_rope(cos[0], sin[0])

    @property
    def latest_cache(self) -> CompressedCache:
        """The cache of the latest prompt."""
        assert self.cache is not None, "the prefill makes it"
        return self.cache

    # ------------------------------------------------------------------ audit
    def kept(self) -> list[Tensor]:
        """Return per layer int64 `[B, Hkv, m]`: logical indices of the prompt's tokens that are stored (-1 = padding)."""
        return self._active_listener.kept()


def _is_fixed(kwargs: Kwargs) -> bool:
    cache = kwargs.get("past_key_values")
    return isinstance(cache, CompressedCache) and bool(cache.layers) and getattr(cache.layers[0], "fixed", False)


def attach(
    model: PreTrainedModel,
    compressor: Compressor,
    budget: Budget | None = None,
    protocol: str = DEFAULT,
    seed: int = 0,
    prompt_tokens: int | None = None,
    answer: AnswerAttention | None = None,
    context: int | None = None,
    phases: Phases = untimed,
    replay: ReplayText | None = None,
    **options: Any,
) -> Session:
    """Return a session that compresses every prompt that `model` prefills inside its `with` block, layer by layer if possible.

    Args:
        model: a supported model in eval mode; it is not changed.
        compressor: the method.
        budget: how much to keep; None only for methods without a budget, such as `full`.
        protocol: a name of `mmkv_bench.protocols`. The caller feeds the tokens that are fed again (`Lengths.fed`; under
            `strict` the last token, whose slot is dropped after scoring). Under `query_agnostic` the caller gives the
            model the context alone. Under `masked` the caller puts the entries of a second prefill into the cache
            (`compression/second_prefill.py`).
        seed: seed of stochastic scorers.
        options: arguments of `Session`.
        prompt_tokens: padded tokens of the whole prompt, if the model is given only a part of it first
            (`query_agnostic`). Decode policies act on the tokens after the prompt.
        answer: attention of the full cache's answer to this prompt, for scorers that need it.
        context: number of first tokens that the budget applies to, if the model is given more of the prompt than these
            (one prompt only).
        phases: a clock's phases, entered when scoring, selecting and reducing begin.
        replay: token ids around a context that is fed again, for scorers that need it.

    Raises:
        ConfigError: no budget for a compressor that needs one; an unknown protocol.
        UnsupportedError: a compressor or protocol that does not compress the prompt that the model is given.
    """
    if budget is None and not compressor.unbudgeted:
        raise ConfigError(f"method {compressor.name} needs a budget; allowed: entries >= 1 or a fraction in (0, 1]")
    if compressor.resamples:
        raise UnsupportedError(compressor.eviction.scorer.alone)
    rule = protocol_named(protocol)
    if rule.streams:
        raise UnsupportedError(
            f"protocol={protocol} feeds a prompt chunk by chunk, which attach does not support; start a run with "
            "this protocol"
        )
    if rule.converses:
        raise UnsupportedError(
            f"protocol={protocol} asks one question after another, but attach compresses one prompt; start a run "
            "with this protocol"
        )
    listener = PrefillListener(compressor, budget, rule, seed, prompt_tokens, context, answer, phases)
    session = Session(model, listener, **options)
    session.check_method(compressor, rule)
    if replay is not None:
        listener.replay = partial(Replay, session.text, replay)
    return session
