"""Weights from a hub, for real: a server on the loopback has the embedded model's files under a hub id, and a run fetches
them, records the commit and answers as the folder does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from mmkv_bench.config.schema import resolve_path
from mmkv_bench.store.store import Store
from tests.cli.setting import CHECKOUT
from tests.run.setting import done

COMMIT = "c0ffee" * 6 + "c0de"
ASKED = ["dataset=pages_walk", "method=snapkv", "budget=32", "limit=1", "model.device=cpu"]


class Hub(BaseHTTPRequestHandler):
    """What the client asks of a hub: files by revision with their commit and checksum, and the repository's listing."""

    folder = None

    def do_GET(self):
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if words[:4] == ["api", "models", "org", "small"]:
            files = sorted(f for f in self.folder.iterdir() if f.is_file())
            if "tree" in words and len(words) > 6:  # a folder of it, and it has none
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
            if "tree" in words:
                body = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": COMMIT} for f in files]
            else:
                body = {"id": "org/small", "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]}
            return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if words[:3] != ["org", "small", "resolve"]:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if words[3] not in ("main", COMMIT):
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        file = self.folder / "/".join(words[4:])
        if not file.is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        body = file.read_bytes()
        return self.send(
            200, body, {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}-{len(body)}"', "Accept-Ranges": "none"}
        )

    do_HEAD = do_GET

    def send(self, status, body, headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    from pathlib import Path

    Hub.folder = Path(resolve_path("pkg://mmkv_bench/tiny/weights"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(hub: str, home, out, *words: str) -> subprocess.CompletedProcess:
    env = CHECKOUT | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "mmkv_bench", "model=hf", "model.path=org/small", *ASKED, f"out={out}", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=600)


@pytest.fixture(scope="module")
def fetched(hub, tmp_path_factory):
    """Rows of a run of the hub id, and the cache that it filled."""
    root = tmp_path_factory.mktemp("hub")
    ended = run(hub, root / "home", root / "rows")
    assert ended.returncode == 0, ended.stderr
    return root


@pytest.mark.full
def test_weights_of_a_hub_answer_as_the_folder_does_and_their_commit_is_recorded(fetched, tmp_path):
    done(tmp_path, "model=tiny", *ASKED)
    rows = {}
    for name, root in (("hub", fetched / "rows"), ("folder", tmp_path)):
        store = Store(root)
        method = {row["cell"]: row["method"] for row in store.cells().to_pylist()}
        rows[name] = {method[row["cell"]]: row["token_ids"] for row in store.responses().to_pylist()}
    assert rows["hub"] == rows["folder"] and len(rows["hub"]) == 2
    cells = Store(fetched / "rows").cells().to_pylist()
    assert {(row["weights"], row["model_revision"]) for row in cells} == {("hub", COMMIT)}


@pytest.mark.full
def test_a_revision_that_the_hub_does_not_have_is_refused(hub, fetched):
    other = run(hub, fetched / "home", fetched / "other", "model.revision=v2")
    assert other.returncode == 2 and "has no revision 'v2'" in other.stderr


@pytest.mark.full
def test_the_commit_named_is_the_same_model_and_runs_without_a_network_once_it_was_fetched(fetched):
    again = run("http://127.0.0.1:9", fetched / "home", fetched / "rows", f"model.revision={COMMIT}")
    assert again.returncode == 0 and "nothing to generate" in again.stdout, again.stderr
