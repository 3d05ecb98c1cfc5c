"""The rules of greedy decoding that a model folder and a task ask for, exactly as stock `generate()` would apply them.

Greedy decoding is what this harness does. Whatever changes greedy's choice and can be reproduced is reproduced with
transformers' own logits processors and stopping criteria; everything else is refused before any work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StopStringCriteria
from transformers.generation import logits_process as stock

from mmkv_bench.errors import UnsupportedError

# Settings that only matter to sampling or beams, to output bookkeeping, or that greedy's argmax cannot see.
_IRRELEVANT = {
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "length_penalty",
    "early_stopping", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "output_logits", "return_dict_in_generate", "bos_token_id", "pad_token_id", "eos_token_id", "transformers_version",
    "max_length", "renormalize_logits", "use_cache", "return_legacy_cache", "cache_config",
    "disable_compile", "compile_config", "do_sample", "num_beam_groups", "diversity_penalty", "continuous_batching_config",
    "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "prefill_chunk_size", "generation_kwargs",
    "low_memory", "max_matching_ngram_size", "prompt_lookup_num_tokens", "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size", "decoder_start_token_id", "cache_implementation", "output_loading_info",
    "begin_suppress_tokens", "suppress_tokens", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "min_length", "min_new_tokens", "max_new_tokens", "stop_strings", "num_beams", "custom_generate",
}  # fmt: skip
_TASK_KEYS = {"max_new_tokens", "min_new_tokens", "stop_strings", "until", "do_sample", "temperature", "top_p",
              "top_k", "num_beams", "repetition_penalty"}  # fmt: skip


@dataclass(frozen=True)
class DecodeRules:
    """Greedy decoding with its processors and stopping rules.

    Attributes:
        max_new_tokens: upper limit of new tokens; eos: ids that end an answer (kept as its last token).
        stop_strings: texts that end an answer; options: the `generate()` keyword arguments that ask stock for the same.
    """

    max_new_tokens: int
    eos: tuple[int, ...]
    stop_strings: tuple[str, ...]
    options: Mapping[str, object]
    config: GenerationConfig
    tokenizer: object = None

    @classmethod
    def read(cls, config: GenerationConfig, task: Mapping[str, object], tokenizer: object = None) -> DecodeRules:
        """Merge a model folder's generation config with a task's settings.

        Raises:
            UnsupportedError: sampling, beams, or any other setting whose effect this loop cannot reproduce.
        """
        unknown = set(task) - _TASK_KEYS
        if unknown:
            raise UnsupportedError(
                f"generation setting {', '.join(sorted(unknown))} is not supported; allowed: "
                f"{', '.join(sorted(_TASK_KEYS))} (greedy decoding only)"
            )
        if task.get("do_sample") or int(task.get("num_beams") or 1) > 1:
            raise UnsupportedError(
                f"the task asks for do_sample={task.get('do_sample')}, num_beams={task.get('num_beams')}; only greedy "
                "decoding can be shared and compared token for token: set do_sample=false and num_beams=1"
            )
        wanted = {k: task[k] for k in ("repetition_penalty", "min_new_tokens") if task.get(k) is not None}
        stops = list(task.get("stop_strings") or []) or list(config.stop_strings or [])
        until = task.get("until") or []
        stops += [s for s in ([until] if isinstance(until, str) else until) if s and s.strip()]
        max_new = int(task.get("max_new_tokens") or config.max_new_tokens or 0)
        if max_new < 1:
            raise UnsupportedError(f"max_new_tokens={task.get('max_new_tokens')} is not a length; give one >= 1")
        if int(config.num_beams or 1) > 1 and task.get("num_beams") is None:
            raise UnsupportedError(
                f"the model folder's generation config asks for {config.num_beams} beams; set num_beams=1"
            )
        merged = GenerationConfig.from_dict({**config.to_dict(), **wanted})
        for name, default in GenerationConfig().to_dict().items():
            value = getattr(merged, name, default)
            if name in _IRRELEVANT or name.startswith("_") or value in (default, None, False, [], {}):
                continue
            raise UnsupportedError(
                f"the model folder's generation config sets {name}={value!r}, which the shared decode loop cannot "
                "reproduce; remove it from generation_config.json or run without this model"
            )
        eos = merged.eos_token_id
        eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
        options = {"max_new_tokens": max_new, "do_sample": False, "num_beams": 1, **wanted}
        if stops:
            if tokenizer is None:
                raise UnsupportedError("stop strings need the model's tokenizer; give a processor that has one")
            options |= {"stop_strings": stops, "tokenizer": tokenizer}
        return cls(max_new, eos, tuple(stops), options, merged, tokenizer)

    def processors(self, prompt_length: int, device: torch.device) -> LogitsProcessorList:
        """Stock processors in stock's order; they read `[R, length]` ids and `[R, V]` float32 logits."""
        config, eos = self.config, torch.tensor(self.eos, device=device)
        made = LogitsProcessorList()
        if config.repetition_penalty is not None and config.repetition_penalty != 1.0:
            made.append(stock.RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
        if config.no_repeat_ngram_size:
            made.append(stock.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids is not None:
            made.append(stock.NoBadWordsLogitsProcessor(config.bad_words_ids, eos if self.eos else None))
        if self.eos and config.min_length:
            made.append(stock.MinLengthLogitsProcessor(config.min_length, eos, device=device))
        if self.eos and config.min_new_tokens:
            made.append(
                stock.MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, eos, device=device)
            )
        if config.suppress_tokens is not None:
            made.append(stock.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        if config.begin_suppress_tokens is not None:
            made.append(
                stock.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=device)
            )
        return made

    def stopper(self) -> StopStringCriteria | None:
        return StopStringCriteria(self.tokenizer, list(self.stop_strings)) if self.stop_strings else None

    def ended(self, token: Tensor) -> Tensor:
        """bool `[R]`: which of the newest tokens `[R]` end their answer."""
        if not self.eos:
            return torch.zeros_like(token, dtype=torch.bool)
        return torch.isin(token, torch.tensor(self.eos, device=token.device))
