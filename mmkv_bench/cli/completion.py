"""Completion of command lines in bash, zsh and fish: verbs, their flags, and what Hydra knows of a run's settings.

Hydra completes `program key=value` lines only; a verb, or `python -m`, it answers with an error of its grammar. So the
verb is taken off first, and Hydra is asked about the rest.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Sequence

from mmkv_bench.cli.grammar import PROGRAM
from mmkv_bench.errors import ConfigError, nearest

_BASH = """\
_mmkv_bench() {
    local line="${COMP_LINE:0:COMP_POINT}"
    local word="${line##*[[:space:]]}"
    COMPREPLY=()
    while IFS= read -r found; do
        [ -n "$found" ] && COMPREPLY+=("$found")
    done < <(PROGRAM --complete "$line" 2>/dev/null)
    # What stands before the last '=' or ':' is on the line already where readline breaks words there.
    local kept="${word%"${COMP_WORDS[COMP_CWORD]}"}"
    if [ "${COMP_WORDS[COMP_CWORD]}" = "=" ]; then kept="$word"; fi
    COMPREPLY=("${COMPREPLY[@]#"$kept"}")
}
complete -o nospace -o default -F _mmkv_bench PROGRAM"""

_ZSH = """\
autoload -Uz compinit; (( $+functions[compdef] )) || compinit
_mmkv_bench() {
    local -a found
    found=("${(@f)$(PROGRAM --complete "${LBUFFER}" 2>/dev/null)}")
    found=(${found:#})
    if (( ${#found} )); then compadd -S '' -Q -- "${found[@]}"; else _files; fi
}
compdef _mmkv_bench PROGRAM"""

_FISH = """\
function __mmkv_bench
    PROGRAM --complete (commandline -cp) 2>/dev/null
end
complete -c PROGRAM -a '(__mmkv_bench)'"""

_SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str = "", *more: str) -> str:
    """Script that a shell evaluates once.

    Raises:
        ConfigError: a shell that has no script here.
    """
    if shell not in _SHELLS or more:
        raise ConfigError(f"--completion {shell}: {nearest(shell, _SHELLS)}")
    return _SHELLS[shell].replace("PROGRAM", PROGRAM)


def candidates(words: Sequence[str]) -> list[str]:
    """Words that may stand where the line ends.

    Args:
        words: one string, the line up to the cursor, with the program's name.
    """
    line = words[0] if words else ""
    before = line.split()[1:]
    last = "" if not before or line[-1:].isspace() else before.pop()
    quote = last[:1] if last[:1] in ("'", '"') else ""
    return [quote + text for text in _offered(before, last.removeprefix(quote))]


def _offered(before: list[str], last: str) -> list[str]:
    """Words that begin with `last`, after the words `before`."""
    from mmkv_bench.cli.tree import VERBS, reader

    if not before and "=" not in last and not last.startswith("-"):
        verbs = [f"{verb} " for verb in VERBS if verb.startswith(last)]
        return verbs + (_settings([], last) if last else [])
    name, rest = (before[0], before[1:]) if before and before[0] in VERBS else ("run", before)
    _, parser = reader(name)
    if last.startswith("-"):
        return [f"{flag} " for flag in parser.flags() if flag.startswith(last)]
    for action in parser._actions:
        if action.choices and (not action.option_strings or (rest and rest[-1] in action.option_strings)):
            taken = action.option_strings or not rest
            found = [f"{choice} " for choice in action.choices if taken and str(choice).startswith(last)]
            if found:
                return found
    if any(action.dest in ("overrides", "names") for action in parser._actions):
        return _settings([word for word in rest if "=" in word and not word.startswith("-")], last)
    return []


def _settings(before: Sequence[str], last: str) -> list[str]:
    """Settings that begin with `last`; in a list, `method=[full,sn`, the element that is being written."""
    opened = re.fullmatch(r"(?P<key>[\w.]+=)\[(?P<done>(.*,)?)(?P<part>\w*)", last)
    if opened is None:
        return _hydra_offers(before, last)
    key, done = opened["key"], opened["done"]
    found = _hydra_offers(before, key + opened["part"])
    return [f"{key}[{done}{text.removeprefix(key)}" for text in found if text.removeprefix(key) not in done.split(",")]


def _hydra_offers(before: Sequence[str], last: str) -> list[str]:
    """Hydra's answer for a run's settings; the papers' tables stand in conf/ too and are none."""
    from mmkv_bench.config.schema import TABLES
    from mmkv_bench.run.multirun import hydra_main

    line = " ".join([PROGRAM, *before, last])
    printed = io.StringIO()
    earlier = os.environ.get("COMP_LINE")
    os.environ["COMP_LINE"] = line
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            hydra_main(["--shell-completion", "query=bash"])
    except Exception:  # noqa: BLE001 - half a line is often no configuration; nothing is offered then
        return []
    finally:
        os.environ.pop("COMP_LINE", None)
        if earlier is not None:
            os.environ["COMP_LINE"] = earlier
    found = {word for word in printed.getvalue().split() if word.startswith(last)}
    return sorted(word for word in found if re.split(r"\W", word)[0] != TABLES)
