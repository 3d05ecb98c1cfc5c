"""A dataset's repository on the hub: what the hub says about it, and what of it the local caches have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

TIMEOUT = 20.0  # seconds that the hub has for an answer


def snapshot(repository: str) -> Path | None:
    """The newest snapshot of a dataset repository in the hub cache, None where there is none."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}" / "snapshots"
    snapshots = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    return snapshots[-1] if snapshots else None


def converted(repository: str) -> bool:
    """Return True where `datasets` keeps files that it made of the repository."""
    from huggingface_hub import constants

    caches = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(caches).expanduser() / repository.replace("/", "___")).is_dir()


def refusal(repository: str, offline: bool) -> str | None:
    """The reason for which a repository's data cannot be had, as a clause; None when they are cached or the hub gives them.

    Costs one request where nothing is cached; without it, libraries would try for minutes before they say so.
    """
    if snapshot(repository) is not None or converted(repository):
        return None
    if offline:
        return f"{repository} is not in the hub cache, and connections are not allowed (offline=false allows them)"
    return ask(repository, files=False).get("error")


def ask(repository: str, files: bool = True) -> dict[str, Any]:
    """Facts of a dataset repository, or why there are none.

    Args:
        files: ask for the sizes of its files, too.

    Returns:
        `commit`, `changed`, `licence`, `gated`, `files` and `bytes`; or `error`, one sentence.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = HfApi().dataset_info(repository, files_metadata=files, timeout=TIMEOUT)
    except GatedRepoError:
        return {"error": f"{repository} is gated; accept its terms on the hub and log in with `hf auth login`"}
    except RepositoryNotFoundError:
        return {"error": f"{repository} is not on the hub, or private; check the name, or log in with `hf auth login`"}
    except OfflineModeIsEnabled:
        return {"error": "HF_HUB_OFFLINE is set, so the hub was not asked; unset it"}
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        return {"error": f"the hub answered {status} for {repository}; try again later"}
    except Exception as error:  # noqa: BLE001 - httpx, sockets, TLS: all say that there is no way to the hub
        return {"error": f"the hub cannot be reached ({type(error).__name__}); check the network"}
    listed = info.siblings or []
    return {
        "commit": info.sha,
        "changed": info.last_modified.date().isoformat() if info.last_modified else None,
        "licence": (info.card_data or {}).get("license"),
        "gated": bool(info.gated),
        "files": len(listed),
        "bytes": sum(file.size or 0 for file in listed),
    }
