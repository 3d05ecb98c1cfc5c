"""What the hub says about a dataset's repository: for `python -m mmkv_bench.data check <name> --online`."""

from __future__ import annotations

from typing import Any


def ask(repository: str) -> dict[str, Any]:
    """Facts of a dataset repository, or why there are none.

    Returns:
        `commit`, `changed`, `licence`, `gated`, `files` and `bytes`; or `error`, one sentence.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    try:
        info = HfApi().dataset_info(repository, files_metadata=True, timeout=20)
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
        return {
            "error": f"the hub cannot be reached ({type(error).__name__}); check the network, or leave out --online"
        }
    files = info.siblings or []
    return {
        "commit": info.sha,
        "changed": info.last_modified.date().isoformat() if info.last_modified else None,
        "licence": (info.card_data or {}).get("license"),
        "gated": bool(info.gated),
        "files": len(files),
        "bytes": sum(file.size or 0 for file in files),
    }
