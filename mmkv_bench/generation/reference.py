"""The tokens of a dataset's reference answer, as the model would have had to write them after the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from mmkv_bench.errors import DataError
from mmkv_bench.models.chat_template import rendered


def reference_tokens(processor, messages: Sequence[dict], reference: str) -> tuple[int, ...]:
    """Token ids of `reference` as the assistant's turn of the conversation.

    The chat template renders prompt and answer together, so that the space or newline it puts between the two is part
    of the answer, as it is when the model writes it. What the template adds behind the answer (end of turn, end of
    text) is left out. Media placeholders stay single tokens here, which changes nothing after them.

    Args:
        messages: the prompt, in Hugging Face's chat format.

    Raises:
        DataError: the reference is empty, or the template does not put it, as it is, right after the prompt.
    """
    answer = reference.strip()
    if not answer:
        raise DataError("the reference answer is empty; give one, or take ppl out of the dataset's measures")
    turn = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    prompt = rendered(processor, messages)
    whole = rendered(processor, [*messages, turn], answering=False)
    rest = whole.removeprefix(prompt)
    lead = len(rest) - len(rest.lstrip())
    if rest == whole or not rest.startswith(answer, lead):
        raise DataError(
            "the chat template does not render the reference answer right after the prompt, so that its tokens are not "
            f"known; it gives {whole[-200:]!r} where the prompt ends in {prompt[-100:]!r}"
        )
    tokenizer = getattr(processor, "tokenizer", processor)
    before, both = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, prompt + rest[: lead + len(answer)])
    )
    if both[: len(before)] != before or len(both) == len(before):
        raise DataError(
            "the tokenizer joins the end of the prompt with the beginning of the reference answer, so that the answer has no "
            "tokens of its own"
        )
    return tuple(both[len(before) :])
