"""A hub that is gated, empty, broken or not there: one sentence each, at once, and none at all for what is cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mmkv_bench.datasets import sources
from mmkv_bench.datasets.specs import spec_from_config
from mmkv_bench.errors import MissingDataError
from mmkv_bench.evaluation.documents import sample_refs
from tests.cli.setting import CHECKOUT

ANSWERS = {
    "gated": (403, {"X-Error-Code": "GatedRepo"}, {}),
    "missing": (404, {"X-Error-Code": "RepoNotFound"}, {}),
    "broken": (500, {}, {}),
    "there": (
        200,
        {},
        {
            "id": "there/data",
            "sha": "0123456789abcdef",
            "lastModified": "2024-05-06T07:08:09.000Z",
            "gated": False,
            "cardData": {"license": "mit"},
            "siblings": [{"rfilename": "a.parquet", "size": 1000}, {"rfilename": "README.md", "size": 24}],
        },
    ),
}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        code, headers, document = next(answer for name, answer in ANSWERS.items() if f"/{name}/" in self.path)
        body = json.dumps(document).encode()
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


def asked(endpoint: str, home, code: str) -> str:
    """What a process of its own prints, for which the hub is at `endpoint`."""
    drop = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
    kept = {name: value for name, value in CHECKOUT.items() if name not in drop}
    done = subprocess.run(
        [sys.executable, "-c", f"from mmkv_bench.datasets import sources; import json\n{code}"],
        env=kept | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_hubs_answers_become_facts_or_one_sentence(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        names = ", ".join(repr(f"{name}/data") for name in ANSWERS)
        code = f"print(json.dumps([[sources.ask(n), sources.refusal(n, False)] for n in ({names})]))"
        gated, missing, broken, there = json.loads(asked(f"http://127.0.0.1:{server.server_port}", tmp_path, code))
    finally:
        server.shutdown()
        server.server_close()
    assert gated[0] == {"error": gated[1]} and "gated; accept its terms on the hub" in gated[1]
    assert missing[0] == {"error": missing[1]} and "not on the hub, or private" in missing[1]
    assert broken[0] == {"error": broken[1]} and "answered 500" in broken[1]
    facts = {"commit": "0123456789abcdef", "changed": "2024-05-06", "licence": "mit", "gated": False}
    assert there == [facts | {"files": 2, "bytes": 1024}, None]


def test_without_a_network_the_sentence_comes_at_once_and_the_cache_needs_none(tmp_path):
    code = """
from pathlib import Path
import shutil
def said(): print(sources.refusal("some/data", False)); print(sources.refusal("some/data", True))
said()
for cache in ("hub/datasets--some--data/snapshots/0123", "datasets/some___data"):
    Path(HOME, cache).mkdir(parents=True); said(); shutil.rmtree(Path(HOME, cache))
""".replace("HOME", repr(str(tmp_path)))
    refused, offline, *cached = asked("http://127.0.0.1:9", tmp_path, code).splitlines()
    assert "the hub cannot be reached (ConnectError); check the network" in refused
    assert "some/data is not in the hub cache, and connections are not allowed" in offline
    assert cached == ["None"] * 4


def test_the_newest_snapshot_is_the_one_that_is_looked_at(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert sources.snapshot("some/data") is None
    for age, commit in ((50, "new"), (100, "old")):
        folder = tmp_path / "datasets--some--data" / "snapshots" / commit
        folder.mkdir(parents=True)
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert sources.snapshot("some/data").name == "new"


def test_a_run_that_may_not_connect_says_what_is_not_there():
    spec = spec_from_config("lmms_eval", {"task": "docvqa_val", "offline": True})
    with pytest.raises(
        MissingDataError, match="data of docvqa_val are not available: lmms-lab.*offline=false.*data.root"
    ):
        sample_refs(spec, 1)
