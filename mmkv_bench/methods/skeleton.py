"""A method file to start from: one that runs as it stands, under the names of the user's file."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.methods.own_file import ROLES

SCORER = "scorer"


def write(path: str, part: str = SCORER) -> None:
    """Write a file with a method's part, and a scorer beside parts that need one.

    Args:
        path: a .py file that does not exist, in a folder that does.
        part: one of `ROLES`.

    Raises:
        ConfigError: another name, a file that is there, a folder that is not, or no such part.
    """
    from mmkv_bench.config.shorthand import check_name

    file = Path(path).expanduser()
    if part not in ROLES:
        raise ConfigError(f"--part {part}: {nearest(part, ROLES)}")
    if file.suffix != ".py":
        raise ConfigError(f"{path} is no Python file's name; allowed: <name>.py; write {file.stem or 'mine'}.py")
    check_name(file.stem, path)
    title = "".join(word[:1].upper() + word[1:] for word in re.split(r"[_-]+", file.stem))
    text = (files("mmkv_bench.methods") / "skeletons" / f"{part}.py").read_text(encoding="utf-8")
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text.replace("Skeleton", title))
    except FileExistsError:
        raise ConfigError(
            f"{path} exists and is left as it is; name a new file, or `mmkv-bench check {path}`"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); name a file in a folder that you may write"
        ) from None
