"""One sentence for a model folder or hub repository that cannot be loaded: what happened and what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def sentence(path: str, revision: str | None, error: BaseException) -> str:
    """The sentence for a `path` that cannot be loaded, from the error of transformers or of the hub's client behind it."""
    what = f"model.path={path}"
    if _looks_local(path):
        if not Path(path).is_dir():
            return f"{what} is not there; give the folder of a Hugging Face checkpoint, or a hub id"
    else:
        causes = list(_causes(error))
        for reported in (
            *(_answered(what, revision, cause) for cause in causes),
            *(_unreached(what, c) for c in causes),
        ):
            if reported is not None:
                return reported
    reason = _first_line(error)
    if "trust_remote_code" in str(error):
        reason = "it needs code of its own repository, which is never run"
    return f"{what} cannot be loaded ({reason}); give a folder with config.json and *.safetensors, or a hub id"


def _answered(what: str, revision: str | None, cause: BaseException) -> str | None:
    """The sentence for an answer of the hub itself."""
    from huggingface_hub import errors

    if isinstance(cause, errors.GatedRepoError):
        return (
            f"{what} is a gated repository and this machine may not read it; accept its terms on its page, log in with "
            "`hf auth login`, or give a local folder"
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"{what} has no revision {revision!r}; give a branch, tag or commit of it with model.revision=<commit>"
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if isinstance(cause, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{what} is no repository of the hub, or a private one that needs a login (`hf auth login`); check the id, "
            "or give a local folder"
        )
    if isinstance(cause, errors.HfHubHTTPError) and status is not None:
        return f"{what}: the hub answered {status} ({_first_line(cause)}); try again later, or give a local folder"
    return None


def _unreached(what: str, cause: BaseException) -> str | None:
    """The sentence for no answer; the client reports one, too, where the hub answered something that it could not use."""
    from huggingface_hub import errors

    if isinstance(cause, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)) or _is_network(cause):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        state = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        return (
            f"{what} is not in the local cache and {state}; connect and run again, or give a local folder with "
            "model.weights=<folder>"
        )
    return None


def _is_network(cause: BaseException) -> bool:
    import httpx

    return isinstance(cause, (httpx.TransportError, ConnectionError, TimeoutError))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, innermost last; the hub's client knows more than the sentence around it."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or os.path.exists(path)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
