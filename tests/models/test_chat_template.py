"""Promise: what a user says reaches the model once, as text, in the form that the model's own chat template takes; what would
not is refused in a sentence that shows the prompt, when the model is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from mmkv_bench.errors import DataError, UnsupportedError
from mmkv_bench.generation.encode import prompt_length
from mmkv_bench.generation.reference import reference_tokens
from mmkv_bench.models.chat_template import DATE, PROBE, Template, check_media, rendered, tokens_of
from mmkv_bench.models.processors import build_processor
from mmkv_bench.models.tokenizer import build_tokenizer
from tests.models.checkpoints import SETTINGS, small_config

CHATML = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
LLAMA = {"<|begin_of_text|>": 0, "<|start_header_id|>": 1, "<|end_header_id|>": 2, "<|eot_id|>": 3}
MISTRAL = {"<s>": 0, "</s>": 1}
ROLES = {
    "chatml": (CHATML, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "smollm": (CHATML, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}),
    "llama": (LLAMA, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_bos_token": True}),
    "mistral": (MISTRAL, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}),
}

# What publishers do, in their own constructs.
PLUS = (  # SmolLM2, Qwen2 and 2.5: a string by +, a system prompt by itself
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe useful"
    "<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FILTER = (  # Llama 3: a filter, which writes a list as Python does
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
EMPTY_ELSE = (  # Qwen3: what is no string is nothing; a switch for thinking
    "{% for message in messages %}{% if message.content is string %}{% set content = message.content %}{% else %}"
    "{% set content = '' %}{% endif %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is "
    "false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
INST = (  # Mistral-Instruct: turns have to alternate, no system turn, no switch for the answer
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
DATED = (  # Llama 3.1 and 3.2
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date_string + '<|eot_id|>' }}"
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + "
    "message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CLOCK = PLUS.replace(
    "Be useful", "It is ' + strftime_now('%A, %Y-%m-%d') + '"
)  # gpt-oss and others ask the clock alone
PARTS = (  # the VLMs: parts alone
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(roles: str, template: str) -> tf.PreTrainedTokenizerFast:
    tokens, settings = ROLES[roles]
    return build_tokenizer(400, tokens, settings, template)


def user(*texts: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_every_publishers_way_gets_the_text_once_and_as_text():
    ways = {
        "plus": ("chatml", PLUS),
        "smollm": ("smollm", PLUS),
        "filter": ("llama", FILTER),
        "inst": ("mistral", INST),
    }
    ways |= {
        "else": ("chatml", EMPTY_ELSE),
        "parts": ("chatml", PARTS),
        "dated": ("llama", DATED),
        "clock": ("chatml", CLOCK),
    }
    for name, (roles, template) in ways.items():
        made = tokenizer(roles, template)
        text = rendered(made, user("Where is", " it?"))
        assert text.count("Where is it?") == 1 and "'type'" not in text and "'text'" not in text, name
        assert Template.of(made).takes_text == (name != "parts")
        # what transformers makes of the message in the form that the template was written for
        stock = user("Where is", " it?") if name == "parts" else [{"role": "user", "content": "Where is it?"}]
        if name != "clock":
            given = {"date_string": "26 Jul 2024"} if name == "dated" else {}
            assert text == made.apply_chat_template(stock, tokenize=False, add_generation_prompt=True, **given), name
        ids = made(text, **tokens_of(made, text))["input_ids"]
        assert ids.count(made.bos_token_id) == 1 or name == "smollm" or made.bos_token_id is None, name
        assert prompt_length(made, user("Where is", " it?")) == len(ids)
        if name == "plus":
            assert made.decode(reference_tokens(made, user("Where?"), "Here")) == "Here"


def test_a_template_that_loses_doubles_or_spells_the_text_out_is_refused_with_what_it_makes():
    lost = EMPTY_ELSE.replace("message.content is string", "message.content is mapping")
    cases = {
        lost: "makes of it '<|im_start|>user\\n<|im_end|>",
        PLUS.replace("message['content']", "(message['content'] | upper)"): "does not pass a user's text on",
        PLUS.replace("+ message['content'] +", "+ message['content'] + message['content'] +"): "content once",
        "{{ messages | tojson }}": "content once",
        PLUS.replace("message['content']", "message['text']"): "fails",
        PLUS.replace(
            "{% if add_generation_prompt %}", "{% if false %}"
        ): "do not end where an answer begins: '<|im_start|>sys",
        PLUS.replace("assistant\n", "assistant\n<|im_end|>"): "do not end where an answer begins",
    }
    for template, said in cases.items():
        with pytest.raises(UnsupportedError) as refused:
            Template.of(tokenizer("chatml", template))
        assert said in str(refused.value) and "\n" not in str(refused.value), template
    with pytest.raises(UnsupportedError, match="begin with two <s>"):
        Template.of(tokenizer("mistral", INST.replace("{{ bos_token }}", "{{ bos_token + bos_token }}")))
    with pytest.raises(UnsupportedError, match="without a chat template"):
        Template.of(SimpleNamespace(chat_template=None))


def test_a_tokenizer_writes_the_beginning_where_its_template_does_not():
    for template in (INST, INST.replace("{{ bos_token }}", "")):
        made = tokenizer("mistral", template)
        text = rendered(made, user("Q"))
        ids = made(text, **tokens_of(made, text))["input_ids"]
        assert ids[0] == 0 and ids.count(0) == 1


def test_turns_that_a_template_refuses_are_a_sentence():
    with pytest.raises(DataError, match="refuses messages of system, user: Conversation roles must alternate"):
        rendered(tokenizer("mistral", INST), [{"role": "system", "content": "S"}, *user("Q")])
    with pytest.raises(UnsupportedError, match="takes text, and the message has parts of type image"):
        rendered(tokenizer("chatml", PLUS), [{"role": "user", "content": [{"type": "image"}]}])


def test_a_date_is_the_same_every_day_and_stands_in_what_the_template_adds():
    assert DATE.strftime("%Y-%m-%d") == "2024-07-26"
    assert "Today Date: 26 Jul 2024" in Template.of(tokenizer("llama", DATED)).probe
    clock = Template.of(tokenizer("chatml", CLOCK)).probe
    assert "It is Friday, 2024-07-26<|im_end|>" in clock and PROBE in clock
    every = "".join(f"%{code}|" for code in ("-d", "-m", *"aAbBdHIjmMpSUwWyY"))
    written = PLUS.replace("Be useful", f"' + strftime_now('{every}') + '")
    assert DATE.strftime(every) in Template.of(tokenizer("chatml", written)).probe


def test_chat_template_jinja_beside_a_tokenizer_is_the_one_that_is_used(tmp_path):
    made = tokenizer("chatml", PLUS)
    made.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(PLUS.replace("Be useful", "From the file"))
    assert "From the file" in Template.of(tf.AutoTokenizer.from_pretrained(tmp_path)).probe
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = PLUS.replace("Be useful", "From the settings")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "From the settings" in Template.of(tf.AutoTokenizer.from_pretrained(tmp_path)).probe


def test_media_stand_once_each_in_the_messages_order_in_every_family():
    for name in SETTINGS:
        if name != "llama":
            check_media(name, build_processor(small_config(name), SETTINGS[name]))
    for broken in ("<image><image>", ""):
        processor = build_processor(small_config("llava_onevision"), SETTINGS["llava_onevision"])
        assert "<image>" in processor.chat_template
        processor.chat_template = processor.chat_template.replace("<image>", broken)
        with pytest.raises(UnsupportedError, match="chat template of ov makes of a message of <image> and mmkvprobeA"):
            check_media("ov", processor)


def test_a_text_model_with_a_published_kind_of_template_answers_every_sample(tmp_path):
    """320 of 320 rows were errors."""
    from mmkv_bench.datasets.fixtures import needle
    from tests.run.setting import done, responses

    folder, data = tmp_path / "smol", tmp_path / "data"
    torch.manual_seed(0)
    made = tokenizer("smollm", PLUS)
    config = tf.LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    made.save_pretrained(folder)
    (data / "needle").mkdir(parents=True)
    needle.make(data / "needle")
    chosen = ("dataset=needle", f"data.root={data}", "method=snapkv", "budget=64", "limit=2")
    done(tmp_path / "rows", "model=hf", f"model.path={folder}", *chosen)
    rows = responses(tmp_path / "rows")
    assert len(rows) == 4 and {row["status"] for row in rows.values()} == {"ok"}
    from mmkv_bench.store.store import Store

    formats = set(Store(tmp_path / "rows").cells()["prompt_format"].to_pylist())
    assert formats == {Template.of(made).probe} and PROBE in formats.pop()
