"""Trackers: a viewer that never costs a run anything but a warning, and fails in seconds where it cannot work."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from store_examples import ENVIRONMENT

from mmkv_bench.errors import ConfigError
from mmkv_bench.store import tracking
from mmkv_bench.store.tracking import RunningMeans, WandbTracker
from tests.wandb_double import installed

RUN = """
import json, logging, os, sys
from pathlib import Path
from mmkv_bench.store.tracking import MEASURED, RunningMeans, WandbTracker, show_summary
logging.basicConfig(level=logging.INFO)
os.environ["HF_TOKEN"] = "hf_very_secret_value"
config = {"budget": [32, 64], "model": {"name": "tiny"}, "max_new_tokens": 8,
          "judge": {"api_key": "sk-123", "url": "https://u:hf_very_secret_value@host"}}
tracked, means = WandbTracker(Path(sys.argv[1]), group="g"), RunningMeans()
assert "wandb" not in sys.modules
tracked.start(config)
for sample in range(5):
    tracked.log(means.add({"snapkv/64/exact_match": float(sample % 2), "prefill_s": None if sample == 0 else 2.0}))
tracked.finish()
CELLS = [{"cell": "c1", "method": "snapkv", "budget": 64, "dataset": "d", "metric": "m", "prompt_tokens": None, "batch": None,
          **dict.fromkeys(MEASURED), "score": 0.4},
         {"cell": "c2", "method": "full", "budget": None, "dataset": "d", "metric": "m", "prompt_tokens": None, "batch": None,
          **dict.fromkeys(MEASURED), "score": 1.0}]
about = {"model": "tiny", "method": "full,snapkv"}
wrote = [show_summary(WandbTracker(Path(sys.argv[1]), group="g"), about, CELLS, each) for each in (False, True, True)]
assert wrote == [True, True, False], wrote
"""


def read_run(folder: Path, name: str) -> dict:
    """What the one offline run of an id holds, by wandb's own reader."""
    from wandb.proto import wandb_internal_pb2 as proto
    from wandb.sdk.internal.datastore import DataStore

    (path,) = folder.glob(f"wandb/offline-run-*-{name}/run-*.wandb")
    reader = DataStore()
    reader.open_for_scan(str(path))
    run = {"id": None, "config": {}, "history": [], "summary": {}, "exit": None, "host": None, "kinds": set()}
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
                "kind": record.run.job_type,
            }
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = record.history.item
            run["history"].append(
                {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            )
        elif kind == "summary":
            items = record.summary.update
            run["summary"] |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
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
    return root, read_run(root, "g-0of1-1"), done.stdout + done.stderr


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
    assert run["kind"] == "live" and not any("results.path" in row for row in run["history"])


@pytest.mark.full
def test_a_summary_is_one_run_of_all_rows_and_cells_are_runs_only_where_asked(offline_run):
    root, _, _ = offline_run
    runs = sorted(path.name.partition("offline-run-")[2].split("-", 1)[1] for path in root.glob("wandb/offline-run-*"))
    assert runs == ["g-0of1-1", "g-c1-m", "g-c2-m", "g-summary"]
    run = read_run(root, "g-summary")
    assert (run["kind"], run["exit"], run["config"]["method"]) == ("summary", 0, "full,snapkv")
    (table,) = [row["results.path"] for row in run["history"] if "results.path" in row]
    (folder,) = root.glob("wandb/offline-run-*-g-summary/files")
    stored = json.loads((folder / table).read_text())
    assert stored["columns"][:3] == ["cell", "method", "budget"]
    assert [row[:3] + [row[stored["columns"].index("score")]] for row in stored["data"]] == [
        ["c1", "snapkv", 64, 0.4],
        ["c2", "full", None, 1.0],
    ]
    cell = read_run(root, "g-c1-m")
    assert (cell["kind"], cell["config"]["method"], cell["config"]["budget"]) == ("cell", "snapkv", 64)
    assert cell["summary"]["score"] == 0.4 and "ttft_s" not in cell["summary"]


@pytest.mark.full
def test_wandbs_files_lie_under_the_root_alone(offline_run):
    root, _, _ = offline_run
    assert {path.name for path in root.iterdir()} == {"wandb"}
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


def test_a_tracker_that_was_not_started_does_nothing_and_does_not_import_wandb(tmp_path):
    code = "import sys; from pathlib import Path; from mmkv_bench.store.tracking import WandbTracker; "
    code += "WandbTracker(Path(sys.argv[1])); print('wandb' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT).stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_running_means_skip_what_was_not_measured():
    means = RunningMeans()
    assert means.add({"a": 1, "b": None}) == {"a": 1.0}
    assert means.add({"b": 4.0}) == {"a": 1.0, "b": 4.0}
    assert means.add({"a": 0.0, "b": 2.0}) == {"a": 0.5, "b": 3.0}


@pytest.fixture
def double(monkeypatch, tmp_path):
    return installed(monkeypatch, tmp_path)


def follow(root: Path) -> None:
    tracked = WandbTracker(root, group="g")
    tracked.start({"a": 1})
    for step in range(3):
        tracked.log({"a": float(step)})
    tracked.finish()


@pytest.mark.slow
def test_a_wandb_that_fails_is_a_warning_and_ends_tracking_only(tmp_path, caplog, double, monkeypatch):
    follow(tmp_path)
    steps = [("log", {"a": float(step)}) for step in range(3)]
    assert double() == [("init", "g-0of1-1"), *steps, ("finish", 0), ("teardown", None)] and not caplog.text
    for number, fails in enumerate(("init", "log", "finish"), 1):
        monkeypatch.setenv("FAILS", fails)
        follow(tmp_path)
        assert double()[-1][0] == fails
        assert caplog.text.count("wandb-core is gone") == number
    (tmp_path / "taken").write_text("")
    follow(tmp_path / "taken")  # no folder can be made there
    assert "wandb cannot start" in caplog.text and not summary(tmp_path / "taken", 0.5)


def test_a_wandb_that_answers_nothing_holds_nobody_up_and_is_ended(tmp_path, caplog, double, monkeypatch):
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.1)
    for blocks in ("init", "log"):
        monkeypatch.setenv("BLOCKS", blocks)
        tracked = WandbTracker(tmp_path)
        tracked.start({"a": "x" * 100_000})  # more than a pipe holds
        for step in range(50):
            tracked.log({"step": step, "more": "x" * 10_000})
        process = tracked._process
        with caplog.at_level(logging.WARNING):
            tracked.finish()
        assert process.returncode is not None and "wandb was too slow" in caplog.text
        caplog.clear()


def test_the_end_of_a_run_that_was_killed_ends_its_wandb(tmp_path, double):
    code = "import os, sys; from pathlib import Path; from mmkv_bench.store.tracking import WandbTracker; "
    code += "t = WandbTracker(Path(sys.argv[1]), group='g'); t.start({})\n"
    code += "while not os.path.exists(os.environ['MET']): pass\nos.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env={**os.environ})
    end = time.monotonic() + 60
    while ("teardown", None) not in double() and time.monotonic() < end:
        time.sleep(0.02)
    assert double() == [("init", "g-0of1-1"), ("finish", 1), ("teardown", None)]


def summary(root: Path, score: float) -> bool:
    row = {**dict.fromkeys(tracking.MEASURED), "cell": "c", "metric": "m", "score": score}
    return tracking.show_summary(WandbTracker(root, group="g"), {"model": "tiny"}, [row])


@pytest.mark.slow
def test_a_summary_is_written_once_and_again_only_where_numbers_changed_or_it_failed(tmp_path, double, monkeypatch):
    monkeypatch.setenv("FAILS", "log")
    assert not summary(tmp_path, 0.5)
    monkeypatch.setenv("FAILS", "")
    before = tmp_path / "wandb" / "offline-run-20261122_000000-g-summary"
    sent = tmp_path / "wandb" / "offline-run-20261121_000000-g-summary"
    for folder in (before, sent):
        folder.mkdir()
    (sent / "run-g-summary.wandb.synced").touch()
    assert [summary(tmp_path, score) for score in (0.5, 0.5, 0.75, 0.5)] == [True, False, True, True]
    assert not before.exists() and sent.exists()  # what was never sent is not sent beside what takes its place
    assert [value for what, value in double() if what == "init"] == ["g-summary"] * 4


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
        WandbTracker(tmp_path, "online")
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


@pytest.mark.full
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
        WandbTracker(tmp_path, "online")


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
        WandbTracker(tmp_path, "online")
        online.delenv("WANDB_API_KEY")
        (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {'y' * 40}\n")
        os.chmod(tmp_path / "netrc", 0o600)
        WandbTracker(tmp_path, "online")
        server.shutdown()


def test_online_behind_a_proxy_leaves_the_network_to_wandb(online, tmp_path):
    online.setenv("WANDB_BASE_URL", "https://wandb.invalid")
    online.setenv("HTTPS_PROXY", "http://proxy.invalid:3128")
    WandbTracker(tmp_path, "online")
