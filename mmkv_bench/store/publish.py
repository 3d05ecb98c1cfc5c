"""Published stores: a flat folder of files with a manifest of their names, sizes and checksums; and `fetch`, which
downloads them.

The folder is flat so that its files can be assets of a release, files of a dataset's repository, or a folder of a web
server. The file `responses/packed-12ab.parquet` of a store is published as `responses-packed-12ab.parquet`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mmkv_bench.errors import ConfigError, StoreError
from mmkv_bench.file_state import file_sha256
from mmkv_bench.store.files import MARK, check_folder, disk_errors, remove_stale, write_bytes, write_whole
from mmkv_bench.store.folder import StoreFolder
from mmkv_bench.store.schema import SCHEMAS

PUBLISHED = tuple(table for table in SCHEMAS if table != "prompts")
"""Tables that are published. Prompts are left out, because their datasets have licences."""
MANIFEST = "manifest.json"
FORMAT = "mmkv_bench rows 1"
RECEIPT, TABLES, ENVIRONMENT = BESIDE = ("receipt.json", "tables.md", "environment.json")
"""Files beside the rows in a bundle: a receipt of `verify`, the tables, and versions and code (`diagnostics/receipt.py`)."""
_PUBLISHED_PATH = re.compile(
    rf"{'|'.join(map(re.escape, (MARK, *BESIDE)))}|({'|'.join(PUBLISHED)})/[A-Za-z0-9_][A-Za-z0-9_.-]*\.parquet"
)
"""All paths that a manifest may list: no absolute path, no path that leaves the folder, no hidden file."""
CHUNK = 1 << 20
"""Bytes read at a time."""
TIMEOUTS = (20.0, 60.0)
"""Seconds to connect to a server, and seconds to wait for the next byte."""
MIN_BYTES_PER_S, PATIENCE_S = 1000, 120.0
"""Fewest bytes a second that a server may send, as a mean over so many seconds of waiting for it."""
LARGEST_MANIFEST = 16 << 20
_HUB_ADDRESS = re.compile(r"hf://datasets/(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[^/@]+))?(/(?P<folder>.+))?")
_DAMAGED_REMEDY = (
    "it was damaged in transfer or replaced; it was discarded, and intact files were kept. Run the same command "
    "again; if that fails too, ask the publisher"
)


@dataclass(frozen=True)
class PublishedFile:
    """One published file: path in the store, size in bytes, and sha256 in hexadecimal digits."""

    path: str
    bytes: int
    sha256: str

    @property
    def name(self) -> str:
        """Return the file's name in the flat folder."""
        return self.path.replace("/", "-")


def check_empty(folder: Path) -> None:
    """Raise ConfigError if the folder is not empty. Call this before packing, which cannot be undone."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        unfinished = folder.is_dir() and not (folder / MANIFEST).exists() and (folder / MARK).exists()
        interruption_note = (
            f" but has no {MANIFEST}, so an interrupted --publish left it: remove it, or" if unfinished else ";"
        )
        raise ConfigError(f"--publish {folder} is not empty{interruption_note} name a new folder")


def publish(store: StoreFolder, folder: Path, beside: Mapping[str, bytes] | None = None) -> str:
    """Copy a packed store into a new flat folder with a manifest.

    Args:
        folder: new or empty, because other files in it would be published too.
        beside: further files to publish, name -> content. Allowed names: `BESIDE`.

    Returns:
        The manifest's sha256. With this from a trusted source, a reader can check all rows.

    Raises:
        ConfigError: the folder is not empty.
        StoreError: the disk refuses.
    """
    check_empty(folder)
    entries = []
    with disk_errors("publishing", folder), store.locked():
        paths = [store.root / MARK, *(path for table in PUBLISHED for path in sorted(store.files(table)))]
        contents = ((path.relative_to(store.root).as_posix(), path.read_bytes()) for path in paths)
        for inside, data in (*contents, *(beside or {}).items()):
            entry = PublishedFile(inside, len(data), hashlib.sha256(data).hexdigest())
            write_bytes(folder / entry.name, data)
            entries.append(entry)
        manifest_bytes = (
            json.dumps({"format": FORMAT, "files": [asdict(entry) for entry in entries]}, indent=1).encode() + b"\n"
        )
        write_bytes(folder / MANIFEST, manifest_bytes)  # last, so that a folder with a manifest is complete
    return hashlib.sha256(manifest_bytes).hexdigest()


@dataclass(frozen=True)
class PublishLocation:
    """A place with published files.

    Attributes:
        shown: the address for messages, without secrets.
        chunks: maps a file's name to an iterator over the file's bytes. Raises StoreError if the file is missing or
            cannot be read to its end.
    """

    shown: str
    chunks: Callable[[str], Iterator[bytes]]


def place(address: str) -> PublishLocation:
    """Return the location of published files at an address.

    address: a folder, its manifest, file://, http://, https:// or hf://datasets/owner/name[@revision][/folder].

    Raises ConfigError: the address has another form, or names a folder that does not exist.
    """
    url_parts = urlsplit(address)
    if url_parts.scheme in ("http", "https") and url_parts.hostname:
        url_parts = url_parts._replace(path=url_parts.path.removesuffix(f"/{MANIFEST}").rstrip("/"), fragment="")
        shown_address = urlunsplit(url_parts._replace(netloc=url_parts.netloc.rpartition("@")[2], query=""))

        def from_web(name: str) -> Iterator[bytes]:
            # The query of the address is sent with every name.
            return _received(
                urlunsplit(url_parts._replace(path=f"{url_parts.path}/{quote(name)}")), f"{shown_address}/{name}"
            )

        return PublishLocation(shown_address, from_web)
    if url_parts.scheme == "hf":
        hub_address = _HUB_ADDRESS.fullmatch(address.removesuffix(f"/{MANIFEST}").rstrip("/"))
        if hub_address is None:
            raise ConfigError(
                f"{address} is not a dataset of the hub; allowed: hf://datasets/<owner>/<name>[@revision][/folder]"
            )
        return PublishLocation(address, partial(_from_hub, hub_address, address))
    path = Path(unquote(url_parts.path)) if url_parts.scheme == "file" else Path(address).expanduser()
    folder = path.parent if path.name == MANIFEST else path
    if not folder.is_dir():
        raise ConfigError(
            f"{address} is not a folder; allowed: a folder with {MANIFEST}, an address (https://..., "
            "hf://datasets/<owner>/<name>[@revision][/folder]), or the path or address of the manifest"
        )
    return PublishLocation(str(folder), partial(_from_folder, folder))


def fetch(
    source: PublishLocation, out: Path, sha256: str | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[int, int]:
    """Fetch the published files of `source` into the folder `out`, except intact files that are there already.

    Args:
        sha256: the manifest's sha256, as returned by `publish`; None trusts the manifest.
        say: called with a line of text for each file.

    Returns:
        The number of files fetched, and the number of files that were in `out` already.

    Raises:
        ConfigError: `out` has other rows, cannot be written, or has not enough space.
        StoreError: the manifest or a file is missing, cannot be read or written, or does not match its checksum.
    """
    manifest_address = f"{source.shown}/{MANIFEST}"
    manifest_bytes = b""
    for piece in source.chunks(MANIFEST):
        manifest_bytes += piece
        if len(manifest_bytes) > LARGEST_MANIFEST:
            raise StoreError(
                f"{manifest_address} is too large for a manifest; give the folder or address of published rows"
            )
    if sha256 is not None and hashlib.sha256(manifest_bytes).hexdigest() != sha256.lower():
        raise StoreError(
            f"{manifest_address} has sha256 {hashlib.sha256(manifest_bytes).hexdigest()}, not {sha256}; nothing was fetched"
        )
    entries = _entries(manifest_bytes, manifest_address)
    missing_entries = _missing(entries, out)
    if missing_entries:
        check_folder(out, sum(entry.bytes for entry in missing_entries) + (1 << 20))
    for number, entry in enumerate(missing_entries, 1):
        say(f"{number} of {len(missing_entries)}: {entry.path}, {entry.bytes / 2**20:.1f} MiB")
        target = out / entry.path
        with disk_errors("fetching", out):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_stale(target.parent)
            write_whole(target, partial(_write, source, entry))
    return len(missing_entries), len(entries) - len(missing_entries)


def _entries(text: bytes, where: str) -> list[PublishedFile]:
    """Return the files of a manifest, with `store.json` last, so that a store fetched in part does not open.

    Raises StoreError: not a manifest, another format, or a file name that no store uses.
    """
    try:
        content = json.loads(text)
        stored_format = content["format"]
        entries = [] if stored_format != FORMAT else [_entry(file) for file in content["files"]]
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise StoreError(
            f"{where} is not a manifest of published rows ({type(problem).__name__}: {problem}); `mmkv-bench pack "
            "<rows> --publish <folder>` makes one"
        ) from None
    if stored_format != FORMAT:
        raise StoreError(
            f"{where} has format {stored_format!r} but this version reads {FORMAT!r}; fetch with the version that wrote it"
        )
    paths = [entry.path for entry in entries]
    if len({*paths}) != len(paths) or MARK not in paths:
        raise StoreError(f"{where} lists a file twice or lacks {MARK}; nothing was fetched; ask the publisher")
    return sorted(entries, key=lambda entry: (entry.path == MARK, entry.path))


def _entry(file: Any) -> PublishedFile:
    path, size, digest = file["path"], file["bytes"], file["sha256"]
    if not isinstance(path, str) or not _PUBLISHED_PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not a file of a store")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise ValueError(f"{path} has no size")
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{path} has no sha256")
    return PublishedFile(path, size, digest)


def _missing(entries: Sequence[PublishedFile], out: Path) -> list[PublishedFile]:
    """Return the published files that the folder `out` lacks.

    Raises ConfigError if `out` has other rows, or a file of the same name with other content.
    """
    remedy = "name another folder, or move that file away"
    paths = {entry.path for entry in entries}
    for table in ("journal", *SCHEMAS):
        for path in sorted((out / table).glob("*")):
            if not path.name.startswith(".") and path.relative_to(out).as_posix() not in paths:
                raise ConfigError(f"{path} does not belong to the published rows, so {out} has other rows; {remedy}")
    missing_entries = []
    for entry in entries:
        path = out / entry.path
        if not path.exists():
            missing_entries.append(entry)
        elif path.stat().st_size != entry.bytes or file_sha256(path) != entry.sha256:
            raise ConfigError(f"{path} exists but differs from the published {entry.path}; {remedy}")
    return missing_entries


def _write(source: PublishLocation, entry: PublishedFile, stream: BinaryIO) -> None:
    """Copy a published file to `stream`. Raises StoreError for a wrong size or sha256; the caller discards the file."""
    shown_name, digest, size = f"{source.shown}/{entry.name}", hashlib.sha256(), 0
    for piece in source.chunks(entry.name):
        size += len(piece)
        if size > entry.bytes:
            break
        digest.update(piece)
        stream.write(piece)
    if size != entry.bytes:
        actual_size = "more" if size > entry.bytes else f"{size:,}"
        raise StoreError(f"{shown_name} should have {entry.bytes:,} bytes but has {actual_size}; {_DAMAGED_REMEDY}")
    if digest.hexdigest() != entry.sha256:
        raise StoreError(
            f"{shown_name} has sha256 {digest.hexdigest()} but the manifest says {entry.sha256}; {_DAMAGED_REMEDY}"
        )


def _from_folder(folder: Path, name: str) -> Iterator[bytes]:
    try:
        with open(folder / name, "rb") as stream:
            while chunk := stream.read(CHUNK):
                yield chunk
    except FileNotFoundError:
        raise StoreError(f"{folder} has no file {name}") from None
    except OSError as problem:
        raise StoreError(f"{folder / name} cannot be read: {problem.strerror or problem}") from problem


def _from_hub(place: re.Match[str], shown: str, name: str) -> Iterator[bytes]:
    """Yield the bytes of a file in a dataset's repository on the hub, with the token of a user who has logged in."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        raise StoreError(f"{shown} cannot be read: HF_HUB_OFFLINE is set; give a folder that holds a copy")
    path_in_repository = f"{place['folder']}/{name}" if place["folder"] else name
    url = hf_hub_url(place["repository"], path_in_repository, repo_type="dataset", revision=place["revision"] or "main")
    yield from _received(url, f"{shown}/{name}", build_hf_headers())


def _received(url: str, shown: str, headers: dict[str, str] | None = None) -> Iterator[bytes]:
    import requests

    headers = {**(headers or {}), "Accept-Encoding": "identity"}
    with _network(shown), requests.get(url, headers=headers, stream=True, timeout=TIMEOUTS) as answer:
        if answer.status_code != 200:
            reasons = {401: "it needs a login (`hf auth login` for the hub)", 403: "you may not read it"}
            remedy = (reasons | {404: "it does not exist"}).get(answer.status_code, "try again later")
            raise StoreError(f"{shown}: the server answered {answer.status_code}; {remedy}")
        yield from _steady(partial(answer.raw.read1, CHUNK, decode_content=True), shown)


def _steady(read: Callable[[], bytes], shown: str) -> Iterator[bytes]:
    """Yield the chunks of `read` until one is empty. Raise StoreError if the server is too slow (`PATIENCE_S`)."""
    waited_s, received_bytes, wait_start = 0.0, 0, monotonic()
    while piece := read():
        waited_s, received_bytes = waited_s + monotonic() - wait_start, received_bytes + len(piece)
        if waited_s >= PATIENCE_S:
            if received_bytes < MIN_BYTES_PER_S * waited_s:
                raise StoreError(
                    f"{shown}: the server sends too slowly ({received_bytes:,} bytes in the last {waited_s:.0f} s, at least "
                    f"{MIN_BYTES_PER_S:,} a second are expected); check the network, and run the same command again: "
                    "files that were "
                    "fetched stay"
                )
            waited_s, received_bytes = 0.0, 0
        yield piece
        wait_start = monotonic()


@contextmanager
def _network(shown: str) -> Iterator[None]:
    """Turn exceptions of `requests` into a StoreError without their text, which has the whole address and secrets."""
    import requests
    from urllib3 import exceptions

    try:
        yield
    except (requests.RequestException, exceptions.HTTPError) as problem:
        if isinstance(problem, requests.exceptions.SSLError):
            reason = "its certificate is not accepted"
        elif isinstance(problem, requests.Timeout | exceptions.ReadTimeoutError):
            reason = "it did not answer in time"
        else:
            reason = "it cannot be reached, or hung up"
        raise StoreError(
            f"{shown}: {reason} ({type(problem).__name__}); check the address and the network, and run the same "
            "command again: files that were fetched stay"
        ) from None
