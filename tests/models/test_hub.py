"""Every way in which a hub repository cannot be had is one sentence, against a hub of our own on the loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cli.setting import CHECKOUT, refusal

ANSWERS = {  # repository -> status and the hub's own header
    "gated": (403, "GatedRepo"),
    "login": (401, "GatedRepo"),
    "missing": (404, "RepoNotFound"),
    "private": (401, None),
    "revision": (404, "RevisionNotFound"),
    "broken": (500, None),
}
WORDS = {
    "gated": "is a gated repository and this machine may not read it; accept its terms",
    "login": "is a gated repository",
    "missing": "is not a repository of the hub, or a private one",
    "private": "is not a repository of the hub, or a private one",
    "revision": "has no revision 'v9'",
    "broken": "the hub answered 500",
}
CHILD = """
import json, sys
from mmkv_bench.errors import ConfigError
from mmkv_bench.models.load import load_config
said = {}
for name in sys.argv[1:]:
    try:
        load_config(f"org/{name}", "v9" if name == "revision" else None)
    except ConfigError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix("/api/models").split("/")[2].split("?")[0]
        status, code = ANSWERS[name]
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def child(tmp_path, *names: str, **env: str) -> dict[str, str]:
    """What loading each repository says, in a process that starts with an empty cache."""
    env = CHECKOUT | {"HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"} | env
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, *names], capture_output=True, text=True, check=False, env=env, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.full
def test_what_the_hub_refuses_is_one_sentence_that_says_what_to_do(hub, tmp_path):
    said = child(tmp_path, *ANSWERS, HF_ENDPOINT=hub)
    assert set(said) == set(ANSWERS), "every one of them is refused"
    for name, sentence in said.items():
        assert WORDS[name] in sentence, (name, sentence)
        assert sentence.startswith(f"model.path=org/{name}") and "\n" not in sentence


@pytest.mark.full
def test_without_a_network_the_sentence_says_so(tmp_path):
    said = child(tmp_path, "anything", HF_ENDPOINT="http://127.0.0.1:9")
    assert "is not in the local cache and the hub cannot be reached; connect and run again" in said["anything"]


@pytest.mark.full
def test_offline_by_choice_is_said_too(tmp_path):
    said = child(tmp_path, "anything", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert "is not in the local cache and HF_HUB_OFFLINE is set" in said["anything"]


@pytest.mark.full
def test_a_run_of_a_gated_model_ends_with_2_and_leaves_nothing(hub, tmp_path):
    env = CHECKOUT | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0"}
    words = ["model=llama_3_8b", "model.path=org/gated", "dataset=pages_walk", "method=snapkv", "limit=1"]
    ended = subprocess.run(
        [sys.executable, "-m", "mmkv_bench", *words, f"out={tmp_path / 'rows'}", "data.source=fixture"],
        capture_output=True, text=True, check=False, env=env, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 2, ended.stderr
    assert refusal(ended.stderr).count("\n") == 1 and "is a gated repository" in ended.stderr
    assert ended.stdout == "" and not (tmp_path / "rows" / "cells").exists()
