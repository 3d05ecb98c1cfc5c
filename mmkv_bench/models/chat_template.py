"""Chat templates: messages rendered as the model's own template wants them, and refused where it renders something else.

A template is a publisher's program. Some take a message's content as a list of parts, some as one string only, and a template
that is given the other form may fail (`+` with a list), write Python's repr of the list, or leave the text out without a word.
Which form one takes is read off probes, which also show whether a prompt arrives whole: see `Template.of`.

Templates that write today's date would make other prompts tomorrow. They get `DATE`, whatever the day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from mmkv_bench.errors import DataError, GenerationTimeout, UnsupportedError

PROBE = "mmkvprobe"
DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a date without a place; Llama 3.1's template writes it where it is given none
_DIRECTIVES = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdHIjmMpSUwWxXyYZz")
_SHOWN = 300  # characters of a rendered prompt in a message


def render(processor: Any, source: str, messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    """Render messages with the template, at `DATE`. answering: up to the place where the next answer begins.

    Raises:
        DataError: the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError

    date = {"chat_template": _dated(source)} if "strftime_now" in source else {}
    if "date_string" in source:  # a processor warns of what its template does not name
        date["date_string"] = DATE.strftime("%d %b %Y")
    try:
        return processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering, **date)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(f"the chat template refuses messages of {roles}: {error}; it cannot be asked this") from error


def _dated(source: str) -> str:
    """A template whose `strftime_now` is a macro of its own, which hides the clock that transformers gives it.

    Jinja drops the line's end behind the macro, so that the template begins a line, as it did."""
    chain = ""
    for code in _DIRECTIVES:
        text = DATE.strftime(f"%{code[-1]}")
        text = (text.lstrip("0") or "0") if code.startswith("-") else text
        chain += f' | replace("%{code}", "{text}")'
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{chain} }}}}{{%- endmacro %}}\n{source}"


def parts_of(content: Any) -> list[dict[str, Any]]:
    """A message's content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: Any) -> str:
    """A message's content as one string.

    Raises:
        UnsupportedError: it has parts of other types than text.
    """
    parts = parts_of(content)
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        raise UnsupportedError(
            f"this model's chat template takes text, and the message has parts of type {', '.join(sorted(kinds))}; ask with text "
            "alone, or give the model's folder a chat_template.jinja that takes parts"
        )
    return "".join(part["text"] for part in parts)


def in_place(processor: Any, source: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message as the template gets it, so that media behind a text stay there: see `chat_template.rendered`."""
    parts = parts_of(message["content"])
    message = {**message, "content": parts}
    kinds = [part["type"] for part in parts]
    behind = set(kinds[kinds.index("text") :] if "text" in kinds else ()) - {"text"}
    if not any(_moved(processor, source, message["role"], kind) for kind in behind):
        return message  # no medium behind a text, or the template leaves it there
    written = {kind: _written(processor, source, message["role"], kind) for kind in {*kinds} - {"text"}}
    text = "".join(part["text"] if part["type"] == "text" else written[part["type"]] for part in parts)
    return {**message, "content": [{"type": "text", "text": text}]}


def _moved(processor: Any, source: str, role: str, kind: str) -> bool:
    """Return True where a template writes an image or video before the text in front of it."""
    marker = getattr(processor, f"{kind}_token", None)
    made = _with(processor, source, role, kind) if marker else ""
    return bool(marker) and made.count(str(marker)) == 1 and made.index(str(marker)) < made.index(PROBE)


def _written(processor: Any, source: str, role: str, kind: str) -> str:
    """The text that such a template writes for an image or video."""
    alone, behind = _with(processor, source, role), _with(processor, source, role, kind)
    differing = (place for place, pair in enumerate(zip(alone, behind, strict=False)) if pair[0] != pair[1])
    start = next(differing, len(alone))
    return behind[start : start + len(behind) - len(alone)]


def _with(processor: Any, source: str, role: str, *kinds: str) -> str:
    parts = [{"type": "text", "text": PROBE}, *({"type": kind} for kind in kinds)]
    return render(processor, source, [{"role": role, "content": parts}], False)


def short(text: str) -> str:
    """A rendered prompt for a message of one line."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")


_ANSWER = "mmkvanswer"
_REPR = re.compile(r"""['"](type|text|content)['"]\s*:""")


@dataclass(frozen=True)
class Template:
    """The form in which one processor's chat template takes messages.

    Attributes:
        takes_text: the content of a user's message is one string; else a list of parts. roles: the same of other roles, each
            probed when it is first met: some templates write a user's parts well and of a system turn Python's repr.
        probe: what it makes of one user message that says `PROBE`: all that it adds by itself.
        add_special_tokens: what the tokenizer is asked for behind it, None where its default is right: as the chat methods of
            transformers do, so that a prompt begins with one beginning-of-text token.
        source: the template's text.
    """

    takes_text: bool
    probe: str
    add_special_tokens: bool | None
    source: str
    roles: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, processor: Any) -> Template:
        """The template of a processor, probed once.

        Raises:
            UnsupportedError: there is no template, or no default one of several; the text of a message does not come out of it
                whole, once and as text; a prompt that begins with two beginning-of-text tokens or none where the tokenizer knows
                one, or that ends a turn.
        """
        source = getattr(processor, "chat_template", None)
        if isinstance(source, Mapping):
            if "default" not in source:
                raise UnsupportedError(
                    f"a model with chat templates called {', '.join(source)} and none called default; name it in its "
                    "tokenizer_config.json, or add chat_template.jinja"
                )
            source = source["default"]
        if not source:
            raise UnsupportedError(
                "a model without a chat template: its prompts cannot be rendered; add chat_template.jinja, or give a base "
                "model's prompts without one with model.template=plain"
            )
        source = str(source)
        template = _templates.get(processor)
        if template is None or template.source != source:
            template = _templates[processor] = _probed(processor, source)
        return template


_templates: WeakKeyDictionary[Any, Template] = WeakKeyDictionary()


def rendered(processor: Any, messages: Sequence[Mapping[str, Any]], answering: bool = True) -> str:
    """Messages in the processor's chat template, media where the messages have them.

    Some templates (LLaVA-1.5's on the hub) write a message's images before its text, wherever they stand. Where that would
    move one, the template gets the message as text, with what it writes for an image in the image's place.

    Args:
        messages: Hugging Face's chat format, content as parts or text. answering: up to where the next answer begins.

    Raises:
        UnsupportedError: see `Template.of`; media for a template that takes text; a user's words or media that do not stand in
            the prompt, whole and in their order, or a role whose text is lost.
        DataError: the template refuses these messages (a system turn, say).
    """
    template = Template.of(processor)
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        if _takes_text(processor, template, str(message["role"])):
            turns.append({**message, "content": text_of(message["content"])})
        else:
            turns.append(in_place(processor, template.source, message))
    text = render(processor, template.source, turns, answering)
    place = 0  # a user's words and media stand in the prompt, whole and in their order
    for message in messages:
        for part in parts_of(message["content"] if message["role"] == "user" else ()):
            kind = part["type"]
            wanted = part["text"].strip() if kind == "text" else getattr(processor, f"{kind}_token", None) or ""
            at = text.find(wanted, place)
            if at < 0 and (kind == "text" or wanted in text):  # a medium without a place at all: `encode` counts them
                raise UnsupportedError(
                    f"the chat template does not write the message's {short(wanted)} where it stands; it makes of the "
                    f"messages {short(text)}"
                )
            place = max(place, at + len(wanted))
    return text


def tokens_of(processor: Any, text: str) -> dict[str, Any]:
    """Keyword arguments that make a processor write one beginning-of-text token before rendered text, or none if it has none."""
    adds = Template.of(processor).add_special_tokens
    return {} if adds is None else {"add_special_tokens": adds}


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
                    f"the chat template of {name} makes of a message of {' and '.join(wanted)} the prompt {short(text)}, in "
                    f"which they stand as {' and '.join(pieces) or 'nothing'}; give the model's folder the template of its "
                    "publisher (chat_template.jinja)"
                )


# ---------------------------------------------------------------------- probes
def _probed(processor: Any, source: str) -> Template:
    takes_text, parts, text = _form(processor, source, [("user", PROBE)])
    if takes_text is None:
        output = next((one for one in (text, parts) if isinstance(one, str)), None)
        problem = f"fails ({text})" if output is None else f"makes of it {short(output)}"
        raise UnsupportedError(
            f"a chat template does not pass a user's text on: given {PROBE!r}, as text or as a list of parts, it {problem}; give "
            "the model's folder a chat_template.jinja that writes each message's content once"
        )
    probe, tokenizer = str(text if takes_text else parts), getattr(processor, "tokenizer", processor)
    begins, adds = tokenizer.bos_token_id, False if tokenizer is processor else None
    if begins is not None and list(tokenizer("a")["input_ids"][:1]) == [begins]:
        adds = tokenizer.bos_token not in probe.partition(PROBE)[0]  # some templates write blanks before it
    ids = list(tokenizer(probe, **({} if adds is None else {"add_special_tokens": adds}))["input_ids"])
    if begins is not None and ids[:2] == [begins, begins]:
        raise UnsupportedError(
            f"the chat template's prompts begin with two {tokenizer.bos_token}: {short(probe)} is tokenised to {ids[:4]}...; "
            "let either the template or the tokenizer write it"
        )
    template = Template(takes_text, probe, adds, source)
    _check_end(processor, template, ids[-1:])
    return template


def _form(
    processor: Any, source: str, turns: Sequence[tuple[str, str]], user: bool | None = None, answering: bool = True
) -> tuple[bool | None, str | Exception, str | Exception]:
    """Decide whether a template takes text, and return that with what it makes of parts and of text; None if neither came out
    right."""
    parts, text = (_attempt(processor, source, turns, form, user, answering) for form in (False, True))
    takes_text = None
    reprs = len(_REPR.findall(text)) if isinstance(text, str) else 0  # a system prompt may speak of such keys
    if isinstance(parts, str) and parts.count(PROBE) == 1 and len(_REPR.findall(parts)) <= reprs:
        takes_text = False
    elif isinstance(text, str) and text.count(PROBE) == 1 and not re.search(f"""['"]{PROBE}['"]""", text):
        takes_text = True
    return takes_text, parts, text


def _takes_text(processor: Any, template: Template, role: str) -> bool:
    """Return True where the template takes the content of this role's messages as text."""
    if role == "user":
        return template.takes_text
    if role not in template.roles:
        answering = role != "assistant"
        turns = [(role, PROBE), ("user", "a")] if answering else [("user", "a"), (role, PROBE)]
        takes_text, parts, text = _form(processor, template.source, turns, template.takes_text, answering)
        if takes_text is None:
            refused = next((one for one in (text, parts) if isinstance(one, DataError)), None)
            if refused is not None and not isinstance(text, str):
                raise refused
            failed = isinstance(text, Exception)
            problem = f"fails ({text})" if failed else f"makes of one that says {PROBE!r} {short(str(text))}"
            raise UnsupportedError(
                f"the chat template does not pass the text of {role} turns on: it {problem}; it cannot be asked this"
            )
        template.roles[role] = takes_text
    return template.roles[role]


def _attempt(
    processor: Any,
    source: str,
    turns: Sequence[tuple[str, str]],
    takes_text: bool,
    user: bool | None = None,
    answering: bool = True,
) -> str | Exception:
    """Render these (role, text), or return the error. user: the form of a user's messages, if another."""
    messages = []
    for role, words in turns:
        as_text = user if role == "user" and user is not None else takes_text
        messages.append({"role": role, "content": words if as_text else [{"type": "text", "text": words}]})
    try:
        return render(processor, source, messages, answering)
    except GenerationTimeout:
        raise
    except Exception as error:  # noqa: BLE001 - a template is a program of others, and fails in ways of its own
        return error


def _check_end(processor: Any, template: Template, last: list[int]) -> None:
    """A prompt that ends a turn would be answered by the end of the text, or by a turn that the model makes up.

    A template may write the same with and without `add_generation_prompt`. Then an answer that is rendered with the prompt tells:
    what it puts between the two is lacking in the prompt.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    prompt, takes_text, end = template.probe, template.takes_text, tokenizer.eos_token
    lacking = [str(end)] if end and prompt.rstrip().endswith(end) else []
    lacking += ["end of text"] if last == [tokenizer.eos_token_id] else []
    if not lacking and _attempt(processor, template.source, [("user", PROBE)], takes_text, answering=False) == prompt:
        turns = [("user", PROBE), ("assistant", _ANSWER)]
        for form in (takes_text, not takes_text):
            answered = _attempt(processor, template.source, turns, form, takes_text, answering=False)
            if isinstance(answered, str) and _ANSWER in answered and answered.startswith(prompt.rstrip()):
                lacking.append(answered[len(prompt.rstrip()) : answered.index(_ANSWER)].strip())
        lacking = lacking if all(lacking) else []
    if lacking:
        raise UnsupportedError(
            f"the chat template's prompts do not end where an answer begins: {short(prompt)} ends the turn; give the model's "
            "folder a chat_template.jinja that listens to add_generation_prompt, and a tokenizer that adds no end of text"
        )
