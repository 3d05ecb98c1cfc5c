"""Which choice an answer names, read as MileBench reads it: with one regular expression out of all options.

Written from the rules of its evaluate.py, slowly and apart from the code under test.
"""

from __future__ import annotations

import re
import string

SPECIAL = "\\.^$*+?{}[]|()"


def tidy(text: str) -> str:
    text = "".join(" " if c in "\n\t" else c for c in text).strip()
    result = text
    has_number = re.search("[0-9],[0-9]", text) is not None
    for sign in ';/[]"{}()=+\\_-><@`,?!':
        near_space = re.search(f"(^|.)?({re.escape(sign)} | {re.escape(sign)})", text) is not None
        result = "".join(result.split(sign)) if near_space or has_number else " ".join(result.split(sign))
    kept, removed = [], 0
    for i, c in enumerate(result):
        if c == "." and not result[i + 1 : i + 2].isdigit() and removed < 32:
            removed += 1
        else:
            kept.append(c)
    return "".join(kept).strip("'").strip('"').strip().lower()


def escaped(text: str) -> str:
    return "".join("\\" + c if c in SPECIAL else c for c in tidy(text))


def named_choice(answer: str, choices: list[str]) -> str:
    """The letters that evaluate.py compares with the reference's; "" for an empty answer (which is C there)."""
    answer = tidy(answer)
    options = dict(zip(string.ascii_uppercase, map(tidy, choices), strict=False))
    if not answer:
        return ""
    found = re.search("(" + "|".join(escaped(f"{k} {v}") for k, v in options.items()) + ")", answer, re.DOTALL)
    if found:
        return found[0][0].upper()
    tight = {k: escaped(v).replace(" ", "") for k, v in options.items()}
    found = re.search("(" + "|".join(tight.values()) + ")", answer.replace(" ", ""), re.DOTALL)
    if found:
        for k, v in tight.items():
            if found[0].strip() == v:
                return k
    if len(answer) == 1 and answer.upper() in options:
        return answer.upper()
    return "".join(c.upper() for c in answer if c.upper() in options)
