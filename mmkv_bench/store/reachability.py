"""Whether wandb could work online, answered in seconds and before wandb is imported."""

from __future__ import annotations

import http.client
import netrc
import os
import ssl
import threading
from urllib.parse import SplitResult, urlsplit

from mmkv_bench.errors import ConfigError

_OFFLINE = "Use logger.mode=offline and run `wandb sync <folder>` later from a machine with network."


def check_online(timeout_s: float = 3.0) -> None:
    """Raises ConfigError, after at most about `timeout_s`, when the server does not answer or no API key is configured.

    The server is WANDB_BASE_URL or api.wandb.ai. Behind a proxy (HTTPS_PROXY, or HTTP_PROXY for a plain http server)
    only the proxy could tell, so only the key is checked.
    """
    url = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"WANDB_BASE_URL is {url.geturl()!r}; it must look like https://api.wandb.ai")
    if not _has_key(url.netloc):
        raise ConfigError(
            f"logger.mode=online needs an API key for {url.hostname}: run `wandb login` or set WANDB_API_KEY. {_OFFLINE}"
        )
    proxy = f"{url.scheme}_proxy"
    if os.environ.get(proxy) or os.environ.get(proxy.upper()):
        return
    problems: list[Exception] = []
    # In a thread, because no socket timeout bounds name resolution; a daemon, so that it never holds the process.
    thread = threading.Thread(target=_ask, args=(url, timeout_s, problems), daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    problem = problems[0] if problems else f"no answer in {timeout_s:g} s" if thread.is_alive() else None
    if problem is not None:
        raise ConfigError(f"logger.mode=online but {url.hostname} cannot be reached ({problem}). {_OFFLINE}")


def _ask(url: SplitResult, timeout_s: float, problems: list[Exception]) -> None:
    """Any HTTP answer will do; a server that accepts connections and stays silent makes wandb hang just as well."""
    host = url.hostname or ""
    try:
        if url.scheme == "http":
            connection = http.client.HTTPConnection(host, url.port, timeout=timeout_s)
        else:
            # Only whether somebody answers: nothing is sent, and wandb itself checks certificates by its own rules.
            unverified = ssl.create_default_context()
            unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=unverified)
        try:
            connection.request("HEAD", "/")
            connection.getresponse()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as problem:
        problems.append(problem)


def _has_key(netloc: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False
