"""Where published files lie: a folder, a web server, a dataset's repository on the Hugging Face hub."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.store.published import MANIFEST

# bytes that are held at a time
CHUNK = 1 << 20
TIMEOUTS = (20.0, 60.0)
"""Seconds to reach a server, and seconds without a byte."""
SLOWEST, PATIENCE_S = 1024, 60.0
"""Bytes per second, over all that has come, below which a file is given up after so many seconds."""
_HUB = re.compile(r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?(/(?P<folder>.+))?")


class Place(ABC):
    """Files by name.

    Attributes:
        shown: the address for people, without what may be secret in it.
    """

    shown: str

    @abstractmethod
    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file.

        Raises:
            StoreError: it is not there, or cannot be read to its end.
        """


def place(address: str) -> Place:
    """What an address names: a folder, its manifest, file://, http://, https:// or hf://datasets/owner/name[@revision][/folder].

    Raises:
        ConfigError: none of these.
    """
    parts = urlsplit(address)
    if parts.scheme in ("http", "https") and parts.hostname:
        return Web(address)
    if parts.scheme == "hf":
        return Hub(address)
    path = Path(unquote(parts.path)) if parts.scheme == "file" else Path(address).expanduser()
    folder = path.parent if path.name == MANIFEST else path
    if not folder.is_dir():
        raise ConfigError(
            f"{address} is no folder; allowed: a folder that holds {MANIFEST}, an address (https://..., "
            "hf://datasets/<owner>/<name>[@revision][/folder]), or that of the manifest itself"
        )
    return Folder(folder)


class Folder(Place):
    """A folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def chunks(self, name: str) -> Iterator[bytes]:
        try:
            with open(self.folder / name, "rb") as stream:
                yield from _pieces(stream)
        except FileNotFoundError:
            raise StoreError(f"{self.shown} holds no {name}") from None
        except OSError as problem:
            raise StoreError(f"{self.folder / name} cannot be read: {problem.strerror or problem}") from problem


class Web(Place):
    """A folder of a web server; what follows a question mark in its address is sent with every name."""

    def __init__(self, address: str) -> None:
        self._parts = urlsplit(address)
        folder = self._parts.path.removesuffix(f"/{MANIFEST}").rstrip("/")
        self._parts = self._parts._replace(path=folder, fragment="")
        host = self._parts.netloc.rpartition("@")[2]
        self.shown = urlunsplit((self._parts.scheme, host, folder, "", ""))

    def chunks(self, name: str) -> Iterator[bytes]:
        yield from _received(
            urlunsplit(self._parts._replace(path=f"{self._parts.path}/{quote(name)}")), f"{self.shown}/{name}"
        )


class Hub(Place):
    """A folder of a dataset's repository; a login of `hf auth login` is sent to the hub, where there is one."""

    def __init__(self, address: str) -> None:
        found = _HUB.fullmatch(address.removesuffix(f"/{MANIFEST}").rstrip("/"))
        if found is None:
            raise ConfigError(
                f"{address} is no dataset of the hub; allowed: hf://datasets/<owner>/<name>[@revision][/folder]"
            )
        self._repository, self._folder = found["repository"], found["folder"]
        self._revision = found["revision"] or "main"
        self.shown = address

    def chunks(self, name: str) -> Iterator[bytes]:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        if constants.HF_HUB_OFFLINE:
            raise StoreError(f"{self.shown} cannot be asked: HF_HUB_OFFLINE is set; unset it, or give a folder")
        inside = f"{self._folder}/{name}" if self._folder else name
        url = hf_hub_url(self._repository, inside, repo_type="dataset", revision=self._revision)
        yield from _received(url, f"{self.shown}/{name}", build_hf_headers())


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    while data := stream.read(CHUNK):
        yield data


def _received(url: str, shown: str, headers: dict[str, str] | None = None) -> Iterator[bytes]:
    import requests

    with (
        _network(shown),
        requests.get(
            url, headers={**(headers or {}), "Accept-Encoding": "identity"}, stream=True, timeout=TIMEOUTS
        ) as answer,
    ):
        if answer.status_code != 200:
            todo = {
                401: "it needs a login (`hf auth login` for the hub)",
                403: "it may not be read by you",
                404: "it is not there",
            }.get(answer.status_code, "try again later")
            raise StoreError(f"{shown}: the server answered {answer.status_code}; {todo}")
        begun, received = time.monotonic(), 0
        while piece := answer.raw.read1(CHUNK):  # as it comes: a whole piece may drip in for hours
            received, waited = received + len(piece), time.monotonic() - begun
            if waited > PATIENCE_S and received < SLOWEST * waited:
                raise StoreError(
                    f"{shown}: {received:,} bytes came in {waited:.0f} s, less than {SLOWEST:,} a second; check the network, and "
                    "run the same command again: files that are there stay"
                )
            yield piece


@contextmanager
def _network(shown: str) -> Iterator[None]:
    """requests' own words hold the whole address and what it was sent with."""
    import requests
    from urllib3 import exceptions

    try:
        yield
    except (requests.RequestException, exceptions.HTTPError) as problem:
        said = {
            requests.exceptions.SSLError: "its certificate is not accepted",
            requests.Timeout: "it did not answer in time",
            exceptions.ReadTimeoutError: "it did not answer in time",
        }
        why = next(
            (words for kind, words in said.items() if isinstance(problem, kind)), "it cannot be reached, or hung up"
        )
        raise StoreError(
            f"{shown}: {why} ({type(problem).__name__}); check the address and the network, and run the same command again: "
            "files that are there stay"
        ) from None
