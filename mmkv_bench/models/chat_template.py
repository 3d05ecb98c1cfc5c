"""Render messages with a model's chat template, and refuse messages that the template does not render correctly.

Some templates take a message's content as a list of parts, others only as a string. With the wrong form, a template may raise an
error, write Python's repr of the list, or drop the text. So each template is probed with test messages (`Template.of`), and
each rendered prompt is checked (`rendered`). Templates that write today's date get the fixed date `DATE`.
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
DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a date without a time zone; the default of Llama 3.1's template
_DIRECTIVES = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdHIjmMpSUwWxXyYZz")
_SHOWN = 300  # characters of a rendered prompt in a message


def render(processor: Any, source: str, messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    """Return the messages as text, rendered by the template `source` at date `DATE`. Raises DataError: the template refuses them.

    answering: whether to add the start of the next answer.
    """
    from jinja2.exceptions import TemplateError

    date = {"chat_template": _dated(source)} if "strftime_now" in source else {}
    if "date_string" in source:  # a processor warns of arguments that its template does not name
        date["date_string"] = DATE.strftime("%d %b %Y")
    try:
        return processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering, **date)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the chat template refuses messages of {roles}: {error}; choose another model or dataset"
        ) from error


def _dated(source: str) -> str:
    """Return the template with a macro `strftime_now` in front, which replaces transformers' function for the current time."""
    branches = ""
    for code in _DIRECTIVES:
        text = DATE.strftime(f"%{code[-1]}")
        text = (text.lstrip("0") or "0") if code.startswith("-") else text
        branches += f' | replace("%{code}", "{text}")'
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{branches} }}}}{{%- endmacro %}}\n{source}"


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return a message's content as a list of parts ({"type", ...}); a string becomes one text part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def text_of(content: Any) -> str:
    """Return a message's content as one string; raise UnsupportedError if the content has media."""
    parts = parts_of(content)
    kinds = {part["type"] for part in parts} - {"text"}
    if kinds:
        raise UnsupportedError(
            f"this model's chat template takes text, but the message has parts of type {', '.join(sorted(kinds))}; ask with text "
            "only, or give the model's folder a chat_template.jinja that takes parts"
        )
    return "".join(part["text"] for part in parts)


def in_place(processor: Any, source: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message in a form in which the template does not move media.

    If the template would write an image or video before a text that precedes it, the message becomes one text with media markers.
    """
    parts = parts_of(message["content"])
    message = {**message, "content": parts}
    kinds = [part["type"] for part in parts]
    media_after_text = set(kinds[kinds.index("text") :] if "text" in kinds else ()) - {"text"}
    if not any(_moved(processor, source, message["role"], kind) for kind in media_after_text):
        return message  # no medium after a text, or the template keeps it there
    marker_texts = {kind: _written(processor, source, message["role"], kind) for kind in {*kinds} - {"text"}}
    text = "".join(part["text"] if part["type"] == "text" else marker_texts[part["type"]] for part in parts)
    return {**message, "content": [{"type": "text", "text": text}]}


def _moved(processor: Any, source: str, role: str, kind: str) -> bool:
    """Tell whether a template writes an image or video (`kind`) before a text that precedes it in the message."""
    marker = getattr(processor, f"{kind}_token", None)
    text_with_marker = _with(processor, source, role, kind) if marker else ""
    return (
        bool(marker)
        and text_with_marker.count(str(marker)) == 1
        and text_with_marker.index(str(marker)) < text_with_marker.index(PROBE)
    )


def _written(processor: Any, source: str, role: str, kind: str) -> str:
    """Return the marker text that a template that writes media before text writes for an image or video (`kind`)."""
    text_without_media, text_with_media = _with(processor, source, role), _with(processor, source, role, kind)
    differing = (
        place for place, pair in enumerate(zip(text_without_media, text_with_media, strict=False)) if pair[0] != pair[1]
    )
    start = next(differing, len(text_without_media))
    return text_with_media[start : start + len(text_with_media) - len(text_without_media)]


def _with(processor: Any, source: str, role: str, *kinds: str) -> str:
    parts = [{"type": "text", "text": PROBE}, *({"type": kind} for kind in kinds)]
    return render(processor, source, [{"role": role, "content": parts}], False)


def short(text: str) -> str:
    """Shorten a rendered prompt so that it fits into a one-line message."""
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")


_ANSWER = "mmkvanswer"
_REPR = re.compile(r"""['"](type|text|content)['"]\s*:""")


@dataclass(frozen=True)
class Template:
    """A processor's chat template and the form in which it takes messages, found by probing.

    Attributes:
        takes_text: whether the template takes a user's content as one string (True) or as a list of parts (False).
        probe: the rendering of one user message `PROBE`.
        add_special_tokens: the tokenizer's argument that gives a prompt at most one beginning-of-text token; None: no argument.
        source: the template's text.
        roles: role -> `takes_text` of this role's messages, probed at first use.
    """

    takes_text: bool
    probe: str
    add_special_tokens: bool | None
    source: str
    roles: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, processor: Any) -> Template:
        """Return a processor's template, probed at the first call.

        Raises:
            UnsupportedError: there is no template, or several without a default. Or the template drops, repeats or escapes a
                user's text, does not begin the model's turn, or makes prompts that begin with two beginning-of-text tokens.
        """
        source = getattr(processor, "chat_template", None)
        if isinstance(source, Mapping):
            if "default" not in source:
                raise UnsupportedError(
                    f"the model has chat templates called {', '.join(source)}, but none called default; name one default in "
                    "tokenizer_config.json, or add chat_template.jinja"
                )
            source = source["default"]
        if not source:
            raise UnsupportedError(
                "the model has no chat template, so prompts cannot be rendered; add chat_template.jinja, or for a base model "
                "set model.template=plain"
            )
        source = str(source)
        template = _templates.get(processor)
        if template is None or template.source != source:
            template = _templates[processor] = _probed(processor, source)
        return template


_templates: WeakKeyDictionary[Any, Template] = WeakKeyDictionary()


def rendered(processor: Any, messages: Sequence[Mapping[str, Any]], answering: bool = True) -> str:
    """Return messages as text, rendered by the processor's chat template, with media markers at the positions of the media.

    Args:
        messages: messages in Hugging Face's chat format, with content as parts or text.
        answering: whether to add the start of the next answer.

    Raises:
        UnsupportedError: see `Template.of`. Or the template takes text and the message has media, or texts and media of a user
            are missing or in another order, or the text of another role is missing.
        DataError: the template refuses these messages (for example a system message).
    """
    template = Template.of(processor)
    turns: list[Mapping[str, Any]] = []
    for message in messages:
        if _takes_text(processor, template, str(message["role"])):
            turns.append({**message, "content": text_of(message["content"])})
        else:
            turns.append(in_place(processor, template.source, message))
    text = render(processor, template.source, turns, answering)
    search_start = 0  # check that a user's texts and media are in the prompt, whole and in order
    for message in messages:
        for part in parts_of(message["content"] if message["role"] == "user" else ()):
            kind = part["type"]
            expected_text = part["text"].strip() if kind == "text" else getattr(processor, f"{kind}_token", None) or ""
            part_start = text.find(expected_text, search_start)
            if part_start < 0 and (
                kind == "text" or expected_text in text
            ):  # `encode` counts media without any placeholder
                raise UnsupportedError(
                    f"the chat template does not write {short(expected_text)} at its position in the message; it renders "
                    f"{short(text)}; use the publisher's template"
                )
            search_start = max(search_start, part_start + len(expected_text))
    return text


def tokens_of(processor: Any, text: str) -> dict[str, Any]:
    """Return the processor's keyword arguments that give rendered text at most one beginning-of-text token."""
    add_special_tokens = Template.of(processor).add_special_tokens
    return {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}


def check_media(name: str, processor: Any) -> None:
    """Raise UnsupportedError if the template does not write each image and video of a prompt once and in order."""
    for kind, layouts in (("image", ("it", "tit", "iit")), ("video", ("it",))):
        marker = getattr(processor, f"{kind}_token", None)
        if getattr(processor, f"{kind}_processor", None) is None or not marker:
            continue
        for layout in layouts:
            probe_words = iter(f"{PROBE}{place}" for place in "AB")
            expected_pieces = [marker if part == "i" else next(probe_words) for part in layout]
            parts = [{"type": kind} if word == marker else {"type": "text", "text": word} for word in expected_pieces]
            text = rendered(processor, [{"role": "user", "content": parts}])
            found_pieces = re.findall(f"{re.escape(marker)}|{PROBE}[AB]", text)
            if kind == "video" and marker not in found_pieces:
                break  # no videos in this template; a prompt with a video is refused later
            if found_pieces != expected_pieces:
                raise UnsupportedError(
                    f"the chat template of {name} renders a message of {' and '.join(expected_pieces)} as {short(text)}, which "
                    f"contains {' and '.join(found_pieces) or 'none of them'}; put the publisher's template "
                    "(chat_template.jinja) into the model's folder"
                )


# ---------------------------------------------------------------------- probes
def _probed(processor: Any, source: str) -> Template:
    takes_text, parts, text = _form(processor, source, [("user", PROBE)])
    if takes_text is None:
        output = next((one for one in (text, parts) if isinstance(one, str)), None)
        problem = f"fails ({text})" if output is None else f"renders {short(output)}"
        raise UnsupportedError(
            f"the chat template loses a user's text: given {PROBE!r}, as text or as a list of parts, it {problem}; put a "
            "chat_template.jinja that writes each message's content once into the model's folder"
        )
    probe, tokenizer = str(text if takes_text else parts), getattr(processor, "tokenizer", processor)
    bos_token_id, adds_special_tokens = tokenizer.bos_token_id, False if tokenizer is processor else None
    if bos_token_id is not None and list(tokenizer("a")["input_ids"][:1]) == [bos_token_id]:
        adds_special_tokens = (
            tokenizer.bos_token not in probe.partition(PROBE)[0]
        )  # some templates write blanks before the token
    ids = list(
        tokenizer(probe, **({} if adds_special_tokens is None else {"add_special_tokens": adds_special_tokens}))[
            "input_ids"
        ]
    )
    if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id]:
        raise UnsupportedError(
            f"the chat template's prompts begin with two {tokenizer.bos_token}: {short(probe)} is tokenised to {ids[:4]}...; "
            "let only the template or only the tokenizer write it"
        )
    template = Template(takes_text, probe, adds_special_tokens, source)
    _check_end(processor, template, ids[-1:])
    return template


def _form(
    processor: Any, source: str, turns: Sequence[tuple[str, str]], user: bool | None = None, answering: bool = True
) -> tuple[bool | None, str | Exception, str | Exception]:
    """Render (role, text) pairs with both forms of content. user, answering: see `_attempt`.

    Return whether the template takes text (False: parts; None: neither), the rendering of parts, and the rendering of text. An
    error takes the place of a rendering.
    """
    parts, text = (_attempt(processor, source, turns, form, user, answering) for form in (False, True))
    takes_text = None
    reprs = len(_REPR.findall(text)) if isinstance(text, str) else 0  # a system prompt may mention such keys
    if isinstance(parts, str) and parts.count(PROBE) == 1 and len(_REPR.findall(parts)) <= reprs:
        takes_text = False
    elif isinstance(text, str) and text.count(PROBE) == 1 and not re.search(f"""['"]{PROBE}['"]""", text):
        takes_text = True
    return takes_text, parts, text


def _takes_text(processor: Any, template: Template, role: str) -> bool:
    """Tell whether the template takes the content of this role's messages as text (True) or as parts (False)."""
    if role == "user":
        return template.takes_text
    if role not in template.roles:
        adds_answer_start = role != "assistant"
        turns = [(role, PROBE), ("user", "a")] if adds_answer_start else [("user", "a"), (role, PROBE)]
        takes_text, parts, text = _form(processor, template.source, turns, template.takes_text, adds_answer_start)
        if takes_text is None:
            refused = next((one for one in (text, parts) if isinstance(one, DataError)), None)
            if refused is not None and not isinstance(text, str):
                raise refused
            failed = isinstance(text, Exception)
            problem = f"fails ({text})" if failed else f"renders {PROBE!r} as {short(str(text))}"
            raise UnsupportedError(
                f"the chat template loses the text of {role} turns: it {problem}; choose a model or dataset without such turns"
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
    """Return the rendering of (role, text) pairs, or the error of the template.

    takes_text: pass contents as text (True) or as parts (False). user: `takes_text` of user turns; None: as for other turns.
    """
    messages = []
    for role, words in turns:
        as_text = user if role == "user" and user is not None else takes_text
        messages.append({"role": role, "content": words if as_text else [{"type": "text", "text": words}]})
    try:
        return render(processor, source, messages, answering)
    except GenerationTimeout:
        raise
    except Exception as error:  # noqa: BLE001 - a template is somebody's program and may raise anything
        return error


def _check_end(processor: Any, template: Template, last: list[int]) -> None:
    """Raise UnsupportedError if the prompt does not begin the model's turn. last: ids of the prompt's last tokens.

    If the template ignores `add_generation_prompt`, prompt and answer are rendered together. A text between the two then shows
    that the prompt lacks the start of the answer.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    prompt, takes_text, eos_text = template.probe, template.takes_text, tokenizer.eos_token
    missing_texts = [str(eos_text)] if eos_text and prompt.rstrip().endswith(eos_text) else []
    missing_texts += ["end of text"] if last == [tokenizer.eos_token_id] else []
    if (
        not missing_texts
        and _attempt(processor, template.source, [("user", PROBE)], takes_text, answering=False) == prompt
    ):
        turns = [("user", PROBE), ("assistant", _ANSWER)]
        for form in (takes_text, not takes_text):
            answered = _attempt(processor, template.source, turns, form, takes_text, answering=False)
            if isinstance(answered, str) and _ANSWER in answered and answered.startswith(prompt.rstrip()):
                missing_texts.append(answered[len(prompt.rstrip()) : answered.index(_ANSWER)].strip())
        missing_texts = missing_texts if all(missing_texts) else []
    if missing_texts:
        raise UnsupportedError(
            f"the chat template's prompts do not end where an answer begins: {short(prompt)} ends the turn; give the model's "
            "folder a chat_template.jinja that uses add_generation_prompt, and a tokenizer that adds no end of text"
        )
