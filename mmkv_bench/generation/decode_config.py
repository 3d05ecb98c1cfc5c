"""Every field of transformers' `GenerationConfig`, sorted by what greedy decoding of a shared prefill does with it.

A field is reproduced, irrelevant or refused. A field that a later transformers adds is in none of the tables; set to
anything, it is refused until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Mapping

from transformers import GenerationConfig

from mmkv_bench.errors import UnsupportedError

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

# Would change the tokens and cannot be reproduced; beside None only the listed values are harmless.
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
    """Refuse a generation config that asks for what the shared decode loop cannot do.

    Raises:
        UnsupportedError: names the setting and its value.
    """
    for name in vars(GenerationConfig()):
        value = getattr(config, name, None)
        if value is None or name in REPRODUCED or name in IRRELEVANT:
            continue
        harmless = REFUSED.get(name, ())
        if value in harmless:
            continue
        allowed = f"allowed: {', '.join(map(repr, harmless))} or no entry" if harmless else "allowed: no entry"
        raise UnsupportedError(
            f"the model folder's generation config sets {name}={value!r}, which greedy decoding of a shared prefill "
            f"cannot reproduce; {allowed}. Correct generation_config.json or choose another model"
        )
