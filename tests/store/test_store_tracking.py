"""Trackers: a viewer that never costs a run anything but a warning, and fails in seconds where it cannot work."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from store_examples import ENVIRONMENT

from mmkv_bench.errors import ConfigError
from mmkv_bench.store import tracking
from mmkv_bench.store.tracking import RunningMeans, tracker
from tests.each import each

RUN = """
import json, logging, os, sys
from mmkv_bench.store.tracking import RunningMeans, tracker
logging.basicConfig(level=logging.INFO)
os.environ["HF_TOKEN"] = "hf_very_secret_value"
config = {"budget": [32, 64], "model": {"name": "tiny"}, "max_new_tokens": 8,
          "judge": {"api_key": "sk-123", "url": "https://u:hf_very_secret_value@host"}}
tracked, means = tracker({"name": "wandb", "group": "g"}, sys.argv[1]), RunningMeans()
assert "wandb" not in sys.modules
tracked.start(config)
for sample in range(5):
    tracked.log(means.add({"snapkv/64/exact_match": float(sample % 2), "prefill_s": None if sample == 0 else 2.0}))
tracked.finish([{"method": "snapkv", "budget": 64, "value": 0.4}, {"method": "full", "budget": None, "value": 1.0}])
"""


def read_run(folder: Path) -> dict:
    """What an offline run holds, by wandb's own reader."""
    from wandb.proto import wandb_internal_pb2 as proto
    from wandb.sdk.internal.datastore import DataStore

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    reader = DataStore()
    reader.open_for_scan(str(path))
    run = {"id": None, "config": {}, "history": [], "exit": None, "host": None, "kinds": set()}
    while (data := reader.scan_data()) is not None:
        record = proto.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        run["kinds"].add(kind)
        if kind == "run":
            run |= {
                "id": record.run.run_id,
                "group": record.run.run_group,
                "project": record.run.project,
                "host": record.run.host,
            }
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            run["history"].append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
        elif kind == "exit":
            run["exit"] = record.exit.exit_code
    return run


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory) -> tuple[Path, dict, str]:
    root, home = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("home")
    unset = ("WANDB_MODE", "WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR")
    environment = {name: value for name, value in ENVIRONMENT.items() if name not in unset}
    environment |= {"HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(root)], capture_output=True, text=True, env=environment, cwd=home
    )
    assert done.returncode == 0, done.stderr
    return root, read_run(root), done.stdout + done.stderr


@pytest.mark.full
def test_an_offline_run_is_read_back_by_wandbs_own_reader(offline_run):
    root, run, said = offline_run
    assert (run["project"], run["group"], run["exit"]) == ("mmkv_bench", "g", 0)
    assert run["id"] == "g-0of1-1"
    assert run["config"]["budget"] == [32, 64]
    assert run["config"]["model"] == {"name": "tiny"}
    steps = [row for row in run["history"] if "snapkv/64/exact_match" in row]
    assert [row["snapkv/64/exact_match"] for row in steps] == pytest.approx([0, 1 / 2, 1 / 3, 1 / 2, 2 / 5])
    assert "prefill_s" not in steps[0]
    assert [row["prefill_s"] for row in steps[1:]] == [2.0] * 4
    (table,) = [row["results.path"] for row in run["history"] if "results.path" in row]
    (folder,) = root.glob("wandb/offline-run-*/files")
    stored = json.loads((folder / table).read_text())
    assert stored["columns"] == ["method", "budget", "value"]
    assert stored["data"] == [["snapkv", 64, 0.4], ["full", None, 1.0]]


@pytest.mark.full
def test_wandbs_files_lie_under_the_root_alone(offline_run):
    root, _, _ = offline_run
    assert [path.name for path in root.iterdir()] == ["wandb"]
    home = next(path for path in root.parent.iterdir() if path.name.startswith("home"))
    assert [path for path in home.rglob("*") if "wandb" in path.name] == []


@pytest.mark.full
def test_no_secret_and_no_host_name_is_tracked(offline_run):
    root, run, said = offline_run
    assert run["config"]["judge"]["api_key"] == "<redacted>"
    assert run["config"]["max_new_tokens"] == 8
    assert run["host"] == ""
    for path in root.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for secret in (b"sk-123", b"hf_very_secret_value"):
                assert secret not in content, path
    assert "environment" not in run["kinds"]  # the record of host, user, command line and paths


def test_no_tracker_does_nothing_and_does_not_import_wandb(tmp_path):
    code = "import sys; from mmkv_bench.store.tracking import tracker; t = tracker({'name': 'none'}, sys.argv[1]); "
    code += "t.start({}); t.log({'a': 1.0}); t.finish([{'a': 1}]); print('wandb' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT).stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_running_means_skip_what_was_not_measured():
    means = RunningMeans()
    assert means.add({"a": 1, "b": None}) == {"a": 1.0}
    assert means.add({"b": 4.0}) == {"a": 1.0, "b": 4.0}
    assert means.add({"a": 0.0, "b": 2.0}) == {"a": 0.5, "b": 3.0}


@each(
    ("config", "message"),
    [
        ({"name": "wandbb"}, "did you mean 'wandb'"),
        ({"name": "wandb", "mode": "onlin"}, "did you mean 'online'"),
        ({"name": "wandb", "projekt": "x"}, "did you mean 'project'"),
    ],
)
def test_unknown_settings_are_refused(tmp_path, config, message):
    with pytest.raises(ConfigError, match=message):
        tracker(config, tmp_path)


def test_a_failure_of_wandb_in_the_run_is_a_warning_and_ends_tracking_only(tmp_path, caplog):
    tracked = tracker({"name": "wandb"}, tmp_path)

    class Broken:
        calls = 0

        def log(self, values: dict) -> None:
            self.calls += 1
            raise RuntimeError("wandb-core is gone")

    tracked._run = broken = Broken()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tracked.log({"a": 1.0})
        tracked.finish([{"a": 1}])
    assert broken.calls == 1
    assert caplog.text.count("wandb-core is gone") == 1


def test_a_wandb_that_answers_nothing_holds_nobody_up(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(tracking, "WAITING", 3)
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.01)
    tracked, free, taken = tracker({"name": "wandb"}, tmp_path), threading.Event(), []

    class Silent:
        def log(self, values: dict) -> None:
            free.wait()
            taken.append(values)

        def finish(self, exit_code: int) -> None:
            taken.append(exit_code)

    tracked._run = Silent()
    for step in range(50):
        tracked.log({"step": step})
    thread = tracked._thread
    with caplog.at_level(logging.WARNING):
        tracked.finish([{"a": 1}])
    assert taken == [] and "wandb was too slow" in caplog.text
    free.set()
    assert thread.daemon


def test_every_attempt_has_an_id_of_its_own_in_the_folders_group(tmp_path):
    ids = []
    threads = [
        threading.Thread(target=lambda: ids.append(tracking.attempt(tmp_path / "wandb", "demo/x-0of2")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ids) == [f"demo-x-0of2-{number}" for number in range(1, 9)]
    assert tracking.attempt(tmp_path / "wandb", "demo/x-1of2") == "demo-x-1of2-1"
    group = tracking.group_of(tmp_path / "a folder")
    assert group.startswith("a-folder-") and group != tracking.group_of(tmp_path / "b" / "a folder")


# Online: seconds, not minutes, and a way out in the message


@pytest.fixture
def online(monkeypatch, tmp_path) -> Iterator[pytest.MonkeyPatch]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    return monkeypatch


def refused(tmp_path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        tracker({"name": "wandb", "mode": "online"}, tmp_path)
    assert "wandb sync" in str(caught.value)
    assert "x" * 40 not in str(caught.value)
    return str(caught.value)


def test_online_without_a_key_is_refused_with_what_to_do(online, tmp_path):
    online.delenv("WANDB_API_KEY")
    assert "wandb login" in refused(tmp_path)


def test_online_with_a_server_that_refuses_is_refused(online, tmp_path):
    with socket.socket() as taken:  # bound, not listening: nobody else can, and connections are refused
        taken.bind(("127.0.0.1", 0))
        online.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert "127.0.0.1 cannot be reached" in refused(tmp_path)


def test_online_with_a_server_that_never_answers_is_refused(online, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        online.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached" in refused(tmp_path)


def test_online_with_an_unknown_name_is_refused(online, tmp_path):
    online.setenv("WANDB_BASE_URL", "https://wandb.invalid")
    assert "wandb.invalid cannot be reached" in refused(tmp_path)


@pytest.mark.parametrize("url", ["api.wandb.ai", "ftp://api.wandb.ai"])
def test_online_with_a_base_url_that_is_none_is_refused(online, tmp_path, url):
    online.setenv("WANDB_BASE_URL", url)
    with pytest.raises(ConfigError, match="must look like https://"):
        tracker({"name": "wandb", "mode": "online"}, tmp_path)


class _Answers(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_online_with_a_key_and_any_answering_server_passes_the_check(online, tmp_path):
    with HTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        online.setenv("WANDB_BASE_URL", f"http://{host}")
        tracker({"name": "wandb", "mode": "online"}, tmp_path)
        online.delenv("WANDB_API_KEY")
        (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'y' * 40}\n")
        os.chmod(tmp_path / "netrc", 0o600)
        tracker({"name": "wandb", "mode": "online"}, tmp_path)
        server.shutdown()


def test_online_behind_a_proxy_leaves_the_network_to_wandb(online, tmp_path):
    online.setenv("WANDB_BASE_URL", "https://wandb.invalid")
    online.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    tracker({"name": "wandb", "mode": "online"}, tmp_path)
