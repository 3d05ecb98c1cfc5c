"""Greedy decoding with the settings of a model folder and a task, as in transformers' `generate()`.

Every field of transformers' `GenerationConfig` is reproduced (with transformers' processors and stopping criteria),
irrelevant, or refused. Any value of a field in none of the three tables is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StopStringCriteria
from transformers.generation import logits_process as stock

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation.smaller_prompts import check_way

# Applied with transformers' own processors and criteria (rules.py).
REPRODUCED = frozenset(
    {
        "max_new_tokens", "min_new_tokens", "min_length", "eos_token_id", "stop_strings", "repetition_penalty",
        "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "renormalize_logits",
    }
)  # fmt: skip

# Cannot change the tokens that greedy decoding gives.
IRRELEVANT: Mapping[str, str] = {
    **dict.fromkeys(
        ("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        "sampling; do_sample=False is passed to generate() explicitly",
    ),
    **dict.fromkeys(
        ("early_stopping", "length_penalty", "num_beam_groups", "diversity_penalty", "low_memory"),
        "beams; num_beams=1 is passed explicitly",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "what generate() hands back besides tokens",
    ),
    **dict.fromkeys(
        ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
         "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type",
         "max_matching_ngram_size"),
        "parameters of assisted decoding, whose switches are refused",
    ),
    **dict.fromkeys(
        ("compile_config", "disable_compile", "cache_config", "max_cache_len", "continuous_batching_config"),
        "parameters of cache kinds and schedulers that are refused",
    ),
    **dict.fromkeys(
        ("bos_token_id", "pad_token_id", "decoder_start_token_id"),
        "prompts are never empty, never padded, and the models are decoders",
    ),
    "max_length": "max_new_tokens wins over it and is always given",
    "_from_model_config": "bookkeeping",
    "transformers_version": "bookkeeping",
}  # fmt: skip

# Fields that would change the tokens and cannot be reproduced; allowed are None and the listed values.
REFUSED: Mapping[str, tuple] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "sequence_bias": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "remove_invalid_values": (False,),
    "exponential_decay_length_penalty": (),
    "token_healing": (False,),
    "max_time": (),
    "is_assistant": (False,),
    "use_mtp": (False,),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "prefill_chunk_size": (),
    "use_cache": (True,),
    "cache_implementation": ("dynamic", "hybrid"),  # both mean the dynamic cache in transformers 5
}


def check(config: GenerationConfig) -> None:
    """Raise UnsupportedError for a generation config with a setting that batched greedy decoding cannot reproduce."""
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        if value is None or name in REPRODUCED or name in IRRELEVANT:
            continue
        harmless = REFUSED.get(name, ())
        if value in harmless:
            continue
        allowed = f"allowed: {', '.join(map(repr, harmless))} or no entry" if harmless else "allowed: no entry"
        raise UnsupportedError(
            f"the model folder's generation config sets {name}={value!r}, which greedy decoding of a shared "
            f"prefill cannot reproduce; {allowed}; correct generation_config.json or choose another model"
        )


_TASK_KEYS = {"max_new_tokens", "min_new_tokens", "stop_strings", "until", "do_sample", "temperature", "top_p",
              "top_k", "num_beams", "repetition_penalty", "cut_prompt"}  # fmt: skip


@dataclass(frozen=True)
class DecodeRules:
    """Greedy decoding with its processors and stopping rules.

    Attributes:
        max_new_tokens: largest number of answer tokens.
        eos: token ids that end an answer; the end token belongs to the answer.
        stop_strings: texts that end an answer.
        options: keyword arguments with which transformers' `generate()` decodes in the same way.
        config: the model folder's generation config, merged with the task's settings.
    """

    max_new_tokens: int
    eos: tuple[int, ...]
    stop_strings: tuple[str, ...]
    options: Mapping[str, Any]
    config: GenerationConfig
    tokenizer: object = None

    def shortened(self, max_new_tokens: int) -> DecodeRules:
        """Return the same rules with another `max_new_tokens`."""
        return replace(self, max_new_tokens=max_new_tokens, options={**self.options, "max_new_tokens": max_new_tokens})

    @classmethod
    def read(cls, config: GenerationConfig, task: Mapping[str, Any], tokenizer: object = None) -> DecodeRules:
        """Return the decoding rules of a model folder's generation config, merged with a task's settings.

        Sampling settings of the folder are ignored; a task that requests sampling is refused. `until` is lmms-eval's name for
        `stop_strings`. Blank stop strings are dropped, as in lmms-eval's model classes, because answers may contain blank lines.

        Raises:
            UnsupportedError: sampling, beams, or another setting that batched greedy decoding cannot reproduce.
        """
        _check_task(task)
        max_new = task.get("max_new_tokens")
        max_new = config.max_new_tokens if max_new is None else max_new
        if max_new is None or int(max_new) < 1:
            raise UnsupportedError(f"max_new_tokens={max_new} is not a length; allowed: 1 or more")
        task_settings = {
            k: task[k] for k in ("repetition_penalty", "min_new_tokens", "num_beams") if task.get(k) is not None
        }
        merged = copy.deepcopy(config)
        for name, value in task_settings.items():
            setattr(merged, name, value)
        check(merged)
        stops = _texts(task.get("stop_strings")) or _texts(config.stop_strings)
        stops = list(dict.fromkeys(stops + _texts(task.get("until"))))
        eos = merged.eos_token_id
        eos = () if eos is None else tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
        options = {
            "max_new_tokens": int(max_new),
            "do_sample": False,
            "num_beams": 1,
            "cache_implementation": None,
            "output_attentions": False,
            "output_hidden_states": False,
            **task_settings,
        }
        if stops:
            if tokenizer is None:
                raise UnsupportedError(
                    "stop strings need the model's tokenizer, but the processor has none; give a processor with a "
                    "tokenizer"
                )
            options |= {"stop_strings": stops, "tokenizer": tokenizer}
        rules = cls(int(max_new), eos, tuple(stops), options, merged, tokenizer)
        try:  # refuse what transformers refuses before any work
            rules.processors(1, torch.device("cpu"))
            _ = rules.stopper
        except (ValueError, TypeError) as error:
            raise UnsupportedError(
                f"transformers refuses the generation settings: {str(error).strip().splitlines()[0]}; correct "
                "generation_config.json or the task's settings"
            ) from error
        return rules

    def processors(self, prompt_length: int, device: torch.device) -> LogitsProcessorList:
        """Return transformers' logits processors in transformers' order, for ids `[R, length]` and float32 logits `[R, V]`."""
        config, eos = self.config, torch.tensor(self.eos, device=device)
        processors = LogitsProcessorList()
        if config.repetition_penalty is not None and config.repetition_penalty != 1.0:
            processors.append(stock.RepetitionPenaltyLogitsProcessor(penalty=config.repetition_penalty))
        if config.no_repeat_ngram_size:
            processors.append(stock.NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
        if config.bad_words_ids is not None:
            processors.append(stock.NoBadWordsLogitsProcessor(config.bad_words_ids, eos if self.eos else None))
        if self.eos and config.min_length and config.min_new_tokens is None:  # the newer setting replaces the older
            processors.append(stock.MinLengthLogitsProcessor(config.min_length, eos, device=device))
        if self.eos and config.min_new_tokens:
            processors.append(
                stock.MinNewTokensLengthLogitsProcessor(prompt_length, config.min_new_tokens, eos, device=device)
            )
        if config.suppress_tokens is not None:
            processors.append(stock.SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
        if config.begin_suppress_tokens is not None:
            processors.append(
                stock.SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=device)
            )
        if config.renormalize_logits:
            processors.append(stock.LogitNormalization())
        return processors

    @cached_property
    def stopper(self) -> StopStringCriteria | None:
        """Transformers' stopping criterion for ids `[R, length]`; None without stop strings."""
        return StopStringCriteria(self.tokenizer, list(self.stop_strings)) if self.stop_strings else None

    def finish(self, ids: Tensor, new: int) -> str | None:
        """Return why an answer ends, `eos`, `stop` or `length`; None if it continues.

        ids: `[1, T + new]`, the prompt and `new` answer tokens.
        """
        if int(ids[0, -1]) in self.eos:
            return "eos"
        if self.stopper is not None and bool(self.stopper(ids, None)[0]):
            return "stop"
        return "length" if new >= self.max_new_tokens else None

    def text(self, tokens: Sequence[int], finish: str | None, tokenizer: Any) -> str:
        """Return the text of the answer `tokens`, without the end token and the stop string that ended it."""
        text = tokenizer.decode(tokens[:-1] if finish == "eos" else tokens, skip_special_tokens=True)
        if finish == "stop":
            stop_positions = [end for end in (text.find(stop) for stop in self.stop_strings) if end >= 0]
            text = text[: min(stop_positions)] if stop_positions else text
        return text


def _check_task(task: Mapping[str, Any]) -> None:
    unknown = set(task) - _TASK_KEYS
    if unknown:
        raise UnsupportedError(
            f"generation setting {', '.join(sorted(unknown))} is not supported; allowed: "
            f"{', '.join(sorted(_TASK_KEYS))} (greedy decoding only)"
        )
    check_way(task.get("cut_prompt"))
    greedy = "only greedy decoding can be shared and compared token for token: set do_sample=false and num_beams=1"
    if task.get("do_sample"):
        raise UnsupportedError(f"the task sets do_sample={task['do_sample']}; {greedy}")
    if task.get("num_beams") not in (None, 1):
        raise UnsupportedError(f"the task sets num_beams={task['num_beams']}; {greedy}")
    if task.get("temperature") and task.get("do_sample") is None:
        raise UnsupportedError(f"the task sets temperature={task['temperature']}, which means sampling; {greedy}")


def _texts(value: str | Iterable[str] | None) -> list[str]:
    texts = [] if value is None else [value] if isinstance(value, str) else list(value)
    return [text for text in texts if text.strip()]
