"""Chat templates: messages rendered as the model's own template wants them, and refused where it renders something else.

A template is a publisher's program. Some take a message's content as a list of parts, some as one string only, and a template
that is given the other form may fail (`+` with a list), write Python's repr of the list, or leave the text out without a word.
Which form one takes is read off probes, which also show whether a prompt arrives whole: see `Template.of`.

Templates that write today's date would make other prompts tomorrow. They get `DATE`, whatever the day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from mmkv_bench.errors import DataError, UnsupportedError

PROBE = "mmkvprobe"
_ANSWER = "mmkvanswer"
DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a date without a place; Llama 3.1's template writes it where it is given none
_DIRECTIVES = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdHIjmMpSUwWxXyYZz")
_SHOWN = 300  # characters of a rendered prompt in a message
_REPR = re.compile(r"""['"](type|text|content)['"]\s*:""")


@dataclass(frozen=True)
class Template:
    """How one processor's chat template takes messages.

    Attributes:
        takes_text: content is one string; else a list of parts.
        probe: what it makes of one user message that says `PROBE`: all that it adds by itself.
        add_special_tokens: what the tokenizer is asked for behind it, None where its default is right: as the chat methods of
            transformers do, so that a prompt begins with one beginning-of-text token.
        source: the template's text.
    """

    takes_text: bool
    probe: str
    add_special_tokens: bool | None
    source: str

    @classmethod
    def of(cls, processor: Any) -> Template:
        """The template of a processor, probed once.

        Raises:
            UnsupportedError: there is none, or the text of a message does not come out of it whole, once and as text; a prompt
                that begins with two beginning-of-text tokens or none where the tokenizer knows one, or that ends a turn.
        """
        source = _source(processor)
        known = _known.get(processor)
        if known is None or known.source != source:
            known = _known[processor] = _probed(processor, source)
        return known


_known: WeakKeyDictionary[Any, Template] = WeakKeyDictionary()


def rendered(processor: Any, messages: Sequence[Mapping[str, Any]], answering: bool = True) -> str:
    """Messages in the processor's chat template, images where the messages have them.

    Some templates (LLaVA-1.5's on the hub) write a message's images before its text, wherever they stand. Where that would
    move an image, the template gets the message as text, with what it writes for an image in the image's place.

    Args:
        messages: Hugging Face's chat format, content as parts or text. answering: up to where the next answer begins.

    Raises:
        UnsupportedError: see `Template.of`; media for a template that takes text.
        DataError: the template refuses these messages (a system turn, say).
    """
    template = Template.of(processor)
    if template.takes_text:
        turns: list[Mapping[str, Any]] = [{**message, "content": _text_of(message["content"])} for message in messages]
    else:
        turns = [_in_place(processor, template.source, message) for message in messages]
    return _render(processor, template.source, turns, answering)


def tokens_of(processor: Any, text: str) -> dict[str, Any]:
    """Keyword arguments that make a processor write one beginning-of-text token before rendered text, or none if it has none."""
    asked = Template.of(processor).add_special_tokens
    return {} if asked is None else {"add_special_tokens": asked}


def check_media(name: str, processor: Any) -> None:
    """Raise UnsupportedError where a prompt's images or videos do not come out of the template once each, in their order."""
    for kind, layouts in (("image", ("it", "tit", "iit")), ("video", ("it",))):
        marker = getattr(processor, f"{kind}_token", None)
        if getattr(processor, f"{kind}_processor", None) is None or not marker:
            continue
        for layout in layouts:
            words = iter(f"{PROBE}{place}" for place in "AB")
            wanted = [marker if part == "i" else next(words) for part in layout]
            parts = [{"type": kind} if word == marker else {"type": "text", "text": word} for word in wanted]
            text = rendered(processor, [{"role": "user", "content": parts}])
            pieces = re.findall(f"{re.escape(marker)}|{PROBE}[AB]", text)
            if kind == "video" and marker not in pieces:
                break  # the template knows no videos: who asks with one is refused then
            if pieces != wanted:
                raise UnsupportedError(
                    f"the chat template of {name} makes of a message of {' and '.join(wanted)} the prompt {_short(text)}, in "
                    f"which they stand as {' and '.join(pieces) or 'nothing'}; give the model's folder the template of its "
                    "publisher (chat_template.jinja)"
                )


# ---------------------------------------------------------------------- probes
def _probed(processor: Any, source: str) -> Template:
    parts = _attempt(processor, source, [{"type": "text", "text": PROBE}])
    text = _attempt(processor, source, PROBE)
    reprs = len(_REPR.findall(text)) if isinstance(text, str) else 0  # a system prompt may speak of such keys
    if isinstance(parts, str) and parts.count(PROBE) == 1 and len(_REPR.findall(parts)) <= reprs:
        takes_text, probe = False, parts
    elif isinstance(text, str) and text.count(PROBE) == 1 and not re.search(f"""['"]{PROBE}['"]""", text):
        takes_text, probe = True, text
    else:
        said = text if isinstance(text, str) else parts if isinstance(parts, str) else None
        problem = f"fails ({text})" if said is None else f"makes of it {_short(said)}"
        raise UnsupportedError(
            f"a chat template does not pass a user's text on: given {PROBE!r}, as text or as a list of parts, it {problem}; give "
            "the model's folder a chat_template.jinja that writes each message's content once"
        )
    template = Template(takes_text, probe, _add_special_tokens(processor, probe), source)
    _check_start(processor, template)
    _check_end(processor, template)
    return template


def _attempt(processor: Any, source: str, content: Any) -> str | Exception:
    try:
        return _render(processor, source, [{"role": "user", "content": content}], True)
    except Exception as error:  # noqa: BLE001 - a template is a program of others, and fails in ways of its own
        return error


def _add_special_tokens(processor: Any, probe: str) -> bool | None:
    tokenizer = getattr(processor, "tokenizer", processor)
    begins = tokenizer.bos_token_id
    adds = begins is not None and list(tokenizer("a")["input_ids"][:1]) == [begins]
    if adds:
        return not probe.startswith(tokenizer.bos_token)
    return False if tokenizer is processor else None


def _check_start(processor: Any, template: Template) -> None:
    tokenizer = getattr(processor, "tokenizer", processor)
    begins, ids = tokenizer.bos_token_id, _ids(processor, template)
    if begins is not None and ids[:2] == [begins, begins]:
        raise UnsupportedError(
            f"the chat template's prompts begin with two {tokenizer.bos_token}: {_short(template.probe)} is tokenised to "
            f"{ids[:4]}...; let either the template or the tokenizer write it"
        )


def _check_end(processor: Any, template: Template) -> None:
    """A prompt that ends a turn would be answered by the end of the text, or by a turn that the model makes up."""
    tokenizer = getattr(processor, "tokenizer", processor)
    prompt, ends = template.probe, set()
    user = {"role": "user", "content": PROBE if template.takes_text else [{"type": "text", "text": PROBE}]}
    answer = {"role": "assistant", "content": _ANSWER if template.takes_text else [{"type": "text", "text": _ANSWER}]}
    try:
        if _render(processor, template.source, [user], False) == prompt:  # the switch is not listened to
            ends.add(_render(processor, template.source, [user, answer], False).rpartition(_ANSWER)[2].strip())
    except Exception:  # noqa: BLE001, S110 - it takes no answers: nothing is known but the end of text
        pass
    ends |= {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
    ids = _ids(processor, template)
    closed = any(end and prompt.rstrip().endswith(end) for end in ends)
    if closed or (tokenizer.eos_token_id is not None and ids and ids[-1] == tokenizer.eos_token_id):
        raise UnsupportedError(
            f"the chat template's prompts do not end where an answer begins: {_short(prompt)} ends the turn; give the model's "
            "folder a chat_template.jinja that listens to add_generation_prompt, and a tokenizer that adds no end of text"
        )


def _ids(processor: Any, template: Template) -> list[int]:
    tokenizer = getattr(processor, "tokenizer", processor)
    asked = {} if template.add_special_tokens is None else {"add_special_tokens": template.add_special_tokens}
    return list(tokenizer(template.probe, **asked)["input_ids"])


# ---------------------------------------------------------------------- rendering
def _source(processor: Any) -> str:
    source = getattr(processor, "chat_template", None)
    if isinstance(source, Mapping):
        source = source.get("default")
    if not source:
        raise UnsupportedError(
            "a model without a chat template: its prompts cannot be rendered; add chat_template.jinja"
        )
    return str(source)


def _render(processor: Any, source: str, messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    from jinja2.exceptions import TemplateError

    given = {"chat_template": _dated(source)} if "strftime_now" in source else {}
    try:
        return processor.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=answering,
            date_string=DATE.strftime("%d %b %Y"),
            **given,
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(f"the chat template refuses messages of {roles}: {error}; it cannot be asked this") from error


def _dated(source: str) -> str:
    """A template whose `strftime_now` is a macro of its own, which hides the clock that transformers gives it."""
    chain = "".join(f' | replace("%{code}", "{_of_date(code)}")' for code in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{chain} }}}}{{%- endmacro -%}}{{{{ '' }}}}{source}"


def _of_date(code: str) -> str:
    plain = DATE.strftime(f"%{code[-1]}")
    return (plain.lstrip("0") or "0") if code.startswith("-") else plain


def _text_of(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        raise UnsupportedError(
            f"this model's chat template takes text, and the message has parts of type {', '.join(kinds)}"
        )
    return "".join(part["text"] for part in parts)


def _in_place(processor: Any, source: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = message["content"]
    kinds = [] if isinstance(parts, str) else [part["type"] for part in parts]
    if "video" in kinds or "image" not in kinds[kinds.index("text") if "text" in kinds else len(kinds) :]:
        return message  # no image behind a text: no template moves it
    written = _written_image(processor, source, message["role"])
    if written is None:
        return message
    text = "".join(written if part["type"] == "image" else part["text"] for part in parts)
    return {**message, "content": [{"type": "text", "text": text}]}


def _written_image(processor: Any, source: str, role: str) -> str | None:
    """What a template writes for an image that it puts before the text in front of it; None where it does not move it."""
    image, probe = {"type": "image"}, {"type": "text", "text": PROBE}

    def text(*parts: dict[str, str]) -> str:
        return _render(processor, source, [{"role": role, "content": list(parts)}], False)

    alone, behind = text(probe), text(probe, image)
    marker = getattr(processor, "image_token", None)
    if not marker or behind.count(marker) != 1 or behind.index(PROBE) < behind.index(marker):
        return None
    start = alone.index(PROBE)
    return behind[start : start + len(behind) - len(alone)]


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")
