"""Promise: what `pack --publish` wrote and `fetch` reads is the same rows, from a folder, a web server or the hub; what was
damaged, left out or made up on the way is refused in a sentence and leaves no file; a second run fetches what is missing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from store_examples import cell, metric_row, response, sample_score, write_scores

from mmkv_bench.store.publish import MANIFEST
from mmkv_bench.store.store import Store
from tests.cli.setting import verb

SECRET = "s3cr3tt0k3n"
HUB = "/datasets/someone/rows/resolve/v1/full"


class Handler(SimpleHTTPRequestHandler):
    """The published folder at /, and as the hub would give it; /endless never ends, /short ends too early, /trickle sends a
    byte now and then, /pauses its answers in pieces."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        self.path = self.path.removeprefix(HUB)
        if self.path.startswith("/short") and MANIFEST not in self.path:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x")
        elif self.path.startswith("/endless") and MANIFEST not in self.path:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(1 << 21))
        elif self.path.startswith("/trickle") and MANIFEST not in self.path:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # the other end hangs up
                for _ in range(200):
                    self.wfile.write(b"x")
                    time.sleep(0.02)
        elif self.path.startswith("/pauses/responses"):
            data = (Path(self.directory) / self.path.removeprefix("/pauses/")).read_bytes()
            self.send_response(200)
            self.end_headers()
            for start in range(0, len(data), len(data) // 8):
                self.wfile.write(data[start : start + len(data) // 8])
                time.sleep(0.03)
        elif self.path.startswith("/locked"):
            self.send_error(401)
        else:
            for name in ("/short/", "/endless/", "/trickle/", "/pauses/"):
                self.path = self.path.replace(name, "/")
            super().do_GET()

    def log_message(self, *said):
        """Silent."""


@pytest.fixture
def published(tmp_path, capsys):
    """The folder of a published store, and its manifest's checksum."""
    store = Store(tmp_path / "rows")
    store.write_cells([cell("c0"), cell("c1")])
    for name in ("c0", "c1"):
        write_scores(store, [sample_score(i, name, value=0.5) for i in range(3)], [metric_row(name, value=0.5)])
    with store.writer("w") as writer:
        for i in range(3):
            writer.commit([response(i, name) for name in ("c0", "c1")])
    assert verb("pack")([str(store.root), "--publish", str(tmp_path / "public")]) == 0
    digest = hashlib.sha256((tmp_path / "public" / MANIFEST).read_bytes()).hexdigest()
    assert digest in capsys.readouterr().out
    return tmp_path / "public", digest


@pytest.fixture
def server(published):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(published[0]))) as serving:
        serving.asked = []
        serving.daemon_threads = True
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving
        serving.shutdown()


def rows(folder):
    store = Store(folder)
    order = [("cell", "ascending"), ("metric", "ascending")]
    return [store.cells().to_pylist(), store.responses().to_pylist(), store.metrics().sort_by(order).to_pylist()]


def content(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_rows_come_whole_from_a_folder_a_server_and_the_hub(published, server, tmp_path, capsys, monkeypatch):
    folder, digest = published
    assert all(path.is_file() for path in folder.iterdir()), "flat"
    port = server.server_address[1]
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        f"http://127.0.0.1:{port}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    )
    sources = [str(folder), str(folder / MANIFEST), folder.as_uri(), f"http://127.0.0.1:{port}/"]
    sources += [f"http://127.0.0.1:{port}/{MANIFEST}?token={SECRET}", "hf://datasets/someone/rows@v1/full"]
    for number, source in enumerate(sources):
        out = tmp_path / f"out{number}"
        assert verb("fetch")([source, "--out", str(out), "--sha256", digest]) == 0, source
        said = capsys.readouterr()
        assert "2 cells in 5 files, 5 fetched, 0 there already" in said.out and SECRET not in said.out + said.err
        assert rows(out) == rows(tmp_path / "rows")
    hub = [path.startswith(HUB) for path, _ in server.asked]
    assert [sent for _, sent in server.asked] == [f"Bearer {SECRET}" if asked else None for asked in hub]
    assert sum(hub) == 6
    assert sum(f"token={SECRET}" in path for path, _ in server.asked) == 6
    before = content(out)
    (gone,) = (out / "samples").iterdir()
    gone.unlink()
    assert verb("fetch")([sources[0], "--out", str(out)]) == 0
    assert "1 fetched, 4 there already" in capsys.readouterr().out and content(out) == before


def test_a_wrong_byte_a_missing_file_and_a_server_that_fails_leave_nothing_wrong(published, server, tmp_path, capsys):
    folder, digest = published
    base = f"127.0.0.1:{server.server_address[1]}"
    part = next(folder.glob("responses-*"))
    right = part.read_bytes()

    def refused(source, *more, code=1):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        assert verb("fetch")([source, "--out", str(out), *more]) == code
        said = capsys.readouterr().err
        assert said.splitlines()[-1].startswith("mmkv_bench: ") and SECRET not in said
        kept = content(out) if out.exists() else {}
        assert all((folder / str(path).replace("/", "-")).read_bytes() == data for path, data in kept.items())
        assert not (out / "store.json").exists() and not [path for path in kept if path.name.startswith(".")]
        return said.splitlines()[-1]

    part.write_bytes(right[:-40] + bytes([right[-40] ^ 1]) + right[-39:])
    for source in (str(folder), f"http://user:{SECRET}@{base}"):
        assert f"{part.name} has sha256" in refused(source)
    part.write_bytes(right + b"x")
    assert f"should have {len(right):,} bytes but has more" in refused(f"http://{base}")
    part.write_bytes(right[:-1])
    assert f"but has {len(right) - 1:,}" in refused(f"http://{base}")
    part.unlink()
    assert f"has no file {part.name}" in refused(str(folder))
    assert "answered 404; it does not exist" in refused(f"http://{base}")
    part.write_bytes(right)
    assert "but has more" in refused(f"http://{base}/endless")
    assert "hung up" in refused(f"http://{base}/short")
    assert "answered 401; it needs a login" in refused(f"http://{base}/locked?sig={SECRET}")
    assert "cannot be reached" in refused(f"http://127.0.0.1:1/x?token={SECRET}")
    assert "not " + "0" * 64 in refused(str(folder), "--sha256", "0" * 64)
    assert f"has no file {MANIFEST}" in refused(str(tmp_path))
    assert "is not a folder; allowed" in refused(str(tmp_path / "nowhere"), code=2)
    assert "is not a dataset of the hub" in refused("hf://someone/rows", code=2)
    assert verb("fetch")([str(folder), "--out", str(tmp_path / "out"), "--sha256", digest]) == 0


@pytest.mark.slow
def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(published, server, tmp_path, capsys, monkeypatch):
    """One that pauses, but sends enough in the whole, is."""
    folder, digest = published
    monkeypatch.setattr("mmkv_bench.store.publish.PATIENCE_S", 0.1)
    out, base = tmp_path / "out", f"http://127.0.0.1:{server.server_address[1]}"
    assert verb("fetch")([f"{base}/trickle", "--out", str(out)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mmkv_bench: ")]
    assert "the server sends too slowly (" in line and "run the same command again" in line
    assert not content(out), "nothing half left behind"
    assert verb("fetch")([f"{base}/pauses", "--out", str(out), "--sha256", digest]) == 0
    assert rows(out) == rows(tmp_path / "rows")


def test_a_manifest_that_leads_elsewhere_writes_nothing(published, tmp_path, capsys):
    folder, _ = published
    right = json.loads((folder / MANIFEST).read_text())
    first = right["files"][0]
    names = ["../x.parquet", "/x.parquet", "cells/../../x.parquet", "cells/.x.parquet", "cells/a/b.parquet"]
    names += ["cells\\x.parquet", "notes.md", "journal/w.jsonl", "", None, "cells/x.parquet\n", "../store.json"]
    wrong = [{**right, "files": [*right["files"], {**first, "path": name}]} for name in names]
    wrong += [{**right, "files": [*right["files"], first]}, {**right, "files": []}, {"files": []}, [], "x"]
    wrong += [
        {**right, "files": [{**first, key: value}]} for key, value in (("bytes", -1), ("sha256", "x"), ("bytes", True))
    ]
    wrong += [{**right, "format": "mmkv_bench rows 2"}]
    outside = content(tmp_path).keys()
    for manifest in wrong:
        (folder / MANIFEST).write_text(json.dumps(manifest))
        assert verb("fetch")([str(folder), "--out", str(tmp_path / "out")]) == 1, manifest
        assert MANIFEST in capsys.readouterr().err
        assert content(tmp_path).keys() == outside


def test_other_rows_are_never_mixed_with_or_replaced(published, tmp_path, capsys):
    folder, _ = published
    out = tmp_path / "out"
    other = Store(out)
    other.write_cells([cell("c9")])
    before = content(out)
    assert verb("fetch")([str(folder), "--out", str(out)]) == 2
    assert "has other rows" in capsys.readouterr().err and content(out) == before
    shutil.rmtree(out)
    assert verb("fetch")([str(folder), "--out", str(out)]) == 0
    (part,) = (out / "cells").iterdir()
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    before = content(out)
    assert verb("fetch")([str(folder), "--out", str(out)]) == 2
    assert "exists but differs from the published" in capsys.readouterr().err and content(out) == before
    assert verb("pack")([str(tmp_path / "rows"), "--publish", str(folder)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert verb("pack")([str(tmp_path / "rows"), str(out), "--publish", str(tmp_path / "new")]) == 2
    assert "publish each folder by itself" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_refused_before_rows_are_packed(tmp_path, capsys):
    """Packing slim cannot be taken back."""
    store = Store(tmp_path / "rows")
    store.write_cells([cell("c0")])
    with store.writer("w") as writer:
        writer.commit([response(0, "c0")])
    before = {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()}
    (tmp_path / "public").mkdir()
    for name, said in (
        ("mine.txt", "is not empty; name"),
        ("store.json", "left it: remove it, or name"),
    ):
        (tmp_path / "public" / name).write_text("x")
        assert verb("pack")([str(store.root), "--slim", "--publish", str(tmp_path / "public")]) == 2
        assert said in capsys.readouterr().err
    assert {path: path.read_bytes() for path in store.root.rglob("*") if path.is_file()} == before
