"""Promise: every field of a generation config that can change greedy output is reproduced or refused by name; so is
every setting of a task."""

from __future__ import annotations

import pytest
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig

from mmkv_bench.errors import UnsupportedError
from mmkv_bench.generation import rules as decode_config
from mmkv_bench.generation.rules import DecodeRules
from tests import zoo
from tests.each import each
from tests.generation import common

NAME, TOKENS = "llama", 8


def fields() -> set[str]:
    return set(vars(GenerationConfig()))


def read(task=None, **config) -> DecodeRules:
    return DecodeRules.read(
        GenerationConfig(**config), {"max_new_tokens": 4} if task is None else task, common.tokenizer()
    )


def generate(**options) -> list[int]:
    model, inputs = zoo.model(NAME), zoo.prompt(NAME)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "num_beams": 1} | options
    return model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :].tolist()


def test_every_field_of_the_generation_config_is_classified_once():
    tables = (decode_config.REPRODUCED, set(decode_config.IRRELEVANT), set(decode_config.REFUSED))
    for name in fields():
        assert sum(name in table for table in tables) == 1, f"{name} must be reproduced, irrelevant or refused"
    assert set().union(*tables) == fields(), "a table names a field that transformers does not have"


# A value of every refused field that asks for something; several look like nothing (0, an id) and are not.
ASKING = {
    "num_beams": (2,),
    "num_return_sequences": (2,),
    "constraints": ([1],),
    "force_words_ids": ([[5]],),
    "penalty_alpha": (0.6,),
    "dola_layers": ("low",),
    "guidance_scale": (1.5, 0),
    "watermarking_config": (WatermarkingConfig(),),
    "sequence_bias": ([[[5], -3.0]],),
    "encoder_repetition_penalty": (1.3, 0.5),
    "encoder_no_repeat_ngram_size": (2,),
    "forced_bos_token_id": (0, 7),
    "forced_eos_token_id": (0, [7, 8]),
    "remove_invalid_values": (True,),
    "exponential_decay_length_penalty": ((3, 1.2),),
    "token_healing": (True,),
    "max_time": (0, 0.0, 5.0),
    "is_assistant": (True,),
    "use_mtp": (True,),
    "prompt_lookup_num_tokens": (2,),
    "assistant_early_exit": (1, 0),
    "prefill_chunk_size": (4,),
    "use_cache": (False,),
    "cache_implementation": ("quantized", "static", "offloaded"),
}


@each("name", sorted(decode_config.REFUSED))
def test_refused_settings_of_a_model_folder_are_named_in_the_error(name):
    for value in ASKING[name]:
        config = GenerationConfig()
        setattr(config, name, value)
        with pytest.raises(UnsupportedError, match=name):
            DecodeRules.read(config, {"max_new_tokens": 4}, common.tokenizer())
    for value in (None, *decode_config.REFUSED[name]):
        config = GenerationConfig()
        setattr(config, name, value)
        DecodeRules.read(config, {"max_new_tokens": 4}, common.tokenizer())


@pytest.mark.slow
@each("name", sorted(decode_config.REFUSED))
def test_values_called_harmless_change_nothing_in_stock(name):
    free = generate()
    for value in decode_config.REFUSED[name]:
        if name != "cache_implementation" or value != "hybrid":  # only a model folder may still say hybrid
            assert generate(**{name: value}) == free
    model = zoo.model(NAME)
    if name == "cache_implementation":
        model.generation_config.cache_implementation = "hybrid"
        try:
            assert generate() == free
        finally:
            model.generation_config.cache_implementation = None


def test_settings_that_look_harmless_and_are_refused_really_change_stock():
    """The reason for refusing them: without it the engine would answer something else than generate() and not say so."""
    free = generate()
    assert generate(encoder_repetition_penalty=3.0) != free  # decoders read their prompt as the encoder's ids
    assert generate(encoder_no_repeat_ngram_size=1) != free
    assert generate(forced_eos_token_id=0) != free
    assert generate(max_time=0) != free
    assert generate(guidance_scale=0, negative_prompt_ids=zoo.prompt(NAME, 1)["input_ids"]) != free


# A value of every irrelevant field that is not its default.
UNUSUAL = {
    "do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "top_h": 0.3, "typical_p": 0.2,
    "epsilon_cutoff": 0.3, "eta_cutoff": 0.3, "early_stopping": True, "length_penalty": 5.0, "num_beam_groups": 1,
    "diversity_penalty": 0.0, "low_memory": True, "output_attentions": True, "output_hidden_states": True,
    "output_scores": True, "output_logits": True, "return_dict_in_generate": True, "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9, "assistant_lookbehind": 2,
    "target_lookbehind": 2, "assistant_ensemble_weight": 0.5, "speculation_type": "dflash",
    "max_matching_ngram_size": 3, "compile_config": CompileConfig(), "disable_compile": True,
    "cache_config": {"nbits": 2}, "max_cache_len": 17, "continuous_batching_config": None, "bos_token_id": 5,
    "pad_token_id": 6, "decoder_start_token_id": 7, "max_length": 3, "_from_model_config": True,
    "transformers_version": "4.0.0",
}  # fmt: skip


@pytest.mark.full
def test_irrelevant_settings_change_neither_stock_nor_the_engine():
    """Each on its own, in the model folder's generation config, where do_sample=False and num_beams=1 are asked for."""
    assert set(UNUSUAL) == set(decode_config.IRRELEVANT)
    model, prompt = zoo.model(NAME), common.encoded(NAME)
    free, own = generate(), model.generation_config
    cells = common.full_cells(("paper", "strict"))
    try:
        for name, value in UNUSUAL.items():
            changed = GenerationConfig(pad_token_id=0)
            setattr(changed, name, value)
            model.generation_config = changed
            rules = common.rules(model, TOKENS)
            sequence = generate(return_dict_in_generate=False, output_attentions=False)
            assert sequence == free, f"{name} is not irrelevant to stock"
            results = common.together(model, NAME, prompt, cells, rules) + common.alone(
                model, NAME, prompt, cells, rules
            )
            for result in results:
                assert (result.status, result.error) == ("ok", None), name
                assert result.token_ids == free, name
    finally:
        model.generation_config = own


def test_settings_of_a_model_folder_that_transformers_does_not_know_are_ignored_as_by_stock():
    model = zoo.model(NAME)
    config = GenerationConfig.from_dict({"pad_token_id": 0, "chat_format": "chatml", "max_window_size": 6144})
    assert DecodeRules.read(config, {"max_new_tokens": 4}).options["max_new_tokens"] == 4
    own, free = model.generation_config, generate()
    try:
        model.generation_config = config
        assert generate() == free
    finally:
        model.generation_config = own


def test_a_field_that_a_later_transformers_adds_is_refused_until_somebody_looked_at_it(monkeypatch):
    class Later(GenerationConfig):
        def __init__(self, **kwargs):
            self.sharpen_logits = kwargs.pop("sharpen_logits", None)
            super().__init__(**kwargs)

    monkeypatch.setattr(decode_config, "GenerationConfig", Later)
    decode_config.check(Later())
    with pytest.raises(UnsupportedError, match="sharpen_logits=2"):
        decode_config.check(Later(sharpen_logits=2))


@each(
    ("task", "named"),
    [
        ({"do_sample": True}, "do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True"),
        ({"temperature": 0.7}, "temperature=0.7"),
        ({"num_beams": 3}, "num_beams=3"),
        ({"guidance_scale": 2}, "guidance_scale"),
        ({"length_penalty": 1.0}, "length_penalty"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": None}, "max_new_tokens=None"),
        ({"repetition_penalty": -2.0}, "penalty"),
    ],
)
def test_task_settings_beyond_greedy_are_refused_by_name(task, named):
    with pytest.raises(UnsupportedError, match=named):
        read({"max_new_tokens": 4} | task)


def test_what_transformers_itself_refuses_is_refused_before_any_work():
    with pytest.raises(UnsupportedError, match="bad_words_ids"):
        read(bad_words_ids=[5])
    with pytest.raises(UnsupportedError, match="stop strings need the model's tokenizer"):
        DecodeRules.read(GenerationConfig(), {"max_new_tokens": 4, "until": ["."]})


def test_greedy_task_settings_are_accepted():
    rules = read(
        {"max_new_tokens": 7, "do_sample": False, "temperature": 0.2, "top_p": None, "num_beams": 1, "until": []}
    )
    assert rules.max_new_tokens == 7 and rules.stop_strings == ()
    assert read({"temperature": 0}, max_new_tokens=9).max_new_tokens == 9  # the folder's length when the task has none
    assert read({"max_new_tokens": 4, "num_beams": 1}, num_beams=4).options["num_beams"] == 1
