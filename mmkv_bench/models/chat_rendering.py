"""One call of a processor's chat template: the template's text, its date, the form of a message, the place of its media."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mmkv_bench.errors import DataError, UnsupportedError

PROBE = "mmkvprobe"
DATE = datetime(2024, 7, 26)  # noqa: DTZ001 - a date without a place; Llama 3.1's template writes it where it is given none
_DIRECTIVES = ("-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdHIjmMpSUwWxXyYZz")
_SHOWN = 300  # characters of a rendered prompt in a message


def source_of(processor: Any) -> str:
    """The text of the template that transformers takes from a processor or tokenizer.

    Raises:
        UnsupportedError: there is none, or several and none of them the default.
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
            "a model without a chat template: its prompts cannot be rendered; add chat_template.jinja"
        )
    return str(source)


def render(processor: Any, source: str, messages: Sequence[Mapping[str, Any]], answering: bool) -> str:
    """Render messages with the template, at `DATE`. answering: up to the place where the next answer begins.

    Raises:
        DataError: the template refuses the messages.
    """
    from jinja2.exceptions import TemplateError

    given = {"chat_template": _dated(source)} if "strftime_now" in source else {}
    if "date_string" in source:  # a processor warns of what its template does not name
        given["date_string"] = DATE.strftime("%d %b %Y")
    try:
        return processor.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answering, **given)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(f"the chat template refuses messages of {roles}: {error}; it cannot be asked this") from error


def _dated(source: str) -> str:
    """A template whose `strftime_now` is a macro of its own, which hides the clock that transformers gives it.

    Jinja drops the line's end behind the macro, so that the template begins a line, as it did."""
    chain = "".join(f' | replace("%{code}", "{_of_date(code)}")' for code in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{chain} }}}}{{%- endmacro %}}\n{source}"


def _of_date(code: str) -> str:
    plain = DATE.strftime(f"%{code[-1]}")
    return (plain.lstrip("0") or "0") if code.startswith("-") else plain


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
