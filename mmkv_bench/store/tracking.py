"""Optional trackers that show a run while it goes on. A tracker is a viewer: the record is the result store alone.

`logger=none` does nothing. `logger=wandb` writes an offline run under `<root>/wandb` (show it later with `wandb sync`);
`mode=online` checks first that the server answers and that a key is configured, because wandb itself keeps a process
alive for many minutes when it cannot reach its server.

Nobody waits for a tracker: numbers go to wandb from a thread of their own, those that it cannot take in time are left out, and
the end of a run waits `PATIENCE_S` for the rest. Runs of one result folder are one group; a run's id is the group, its shard
and how many attempts came before, so that a job that is queued again makes no second run of the same id (an offline run
cannot be resumed) and the attempts of one job stand beside each other.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store import reachability
from mmkv_bench.store.redaction import redact

log = logging.getLogger(__name__)

MODES = ("offline", "online")
WAITING = 1000
"""Steps that may wait for wandb; further ones are left out."""
PATIENCE_S = 15.0
"""Seconds that the end of a run waits for wandb in all: a job that is preempted has no more than some tens."""


class Tracker(Protocol):
    def start(self, config: Mapping[str, Any]) -> None:
        """Opens the run with the resolved configuration (secrets are redacted)."""

    def log(self, values: Mapping[str, float]) -> None:
        """One step of numbers, normally `RunningMeans.add` of a sample's values."""

    def finish(self, table: Sequence[Mapping[str, Any]] = (), failed: bool = False) -> None:
        """Closes the run; `table` is the final result table, one mapping per row with the same keys in each."""


class RunningMeans:
    """Means over all samples so far, per name."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, values: Mapping[str, float | None]) -> dict[str, float]:
        """Takes one sample's values in (None: not measured, skipped) and returns the mean of every name seen so far."""
        for name, value in values.items():
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        return {name: total / count for name, (total, count) in self._sums.items()}


def tracker(config: Mapping[str, Any], root: Path | str) -> Tracker:
    """The tracker `config` asks for: `name` (none | wandb), and for wandb `mode`, `project`, `entity`, `group`, `run`,
    `shard` (part of the run's id).

    Raises ConfigError for anything else, and at once, before any work, when mode=online cannot work.
    """
    config = dict(config)
    name = config.pop("name", "none") or "none"
    if name == "none":
        return NoTracker()
    if name != "wandb":
        raise ConfigError(f"logger {name!r} is not known; {nearest(str(name), ('none', 'wandb'))}")
    allowed = ("mode", "project", "entity", "group", "run", "shard")
    for key in config:
        if key not in allowed:
            raise ConfigError(f"logger.{key} is not a setting of the wandb logger; {nearest(str(key), allowed)}")
    return WandbTracker(Path(root), **config)


class NoTracker:
    """Tracks nothing."""

    def start(self, config: Mapping[str, Any]) -> None:
        pass

    def log(self, values: Mapping[str, float]) -> None:
        pass

    def finish(self, table: Sequence[Mapping[str, Any]] = (), failed: bool = False) -> None:
        pass


class WandbTracker:
    """Writes a Weights & Biases run. A failure of wandb after the start is warned about once and ends tracking only; a slow
    one holds nobody up."""

    def __init__(
        self,
        root: Path,
        mode: str = "offline",
        project: str = "mmkv_bench",
        entity: str | None = None,
        group: str | None = None,
        run: str | None = None,
        shard: str = "0of1",
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode!r} is not known; {nearest(str(mode), MODES)}")
        if mode == "online":
            reachability.check_online()
        self._root, self._mode = root, mode
        self._names = {"project": project, "entity": entity, "group": group or group_of(root), "name": run}
        self._shard = shard
        self._run: Any = None
        self._mail: queue.Queue[Callable[[Any], object] | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._left_out = 0

    def start(self, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as problem:
            raise ConfigError(
                f"logger=wandb needs the package wandb ({problem}); install it or use logger=none"
            ) from None
        folder = self._root.absolute() / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        # wandb takes these three folders from the environment only; a user's own choice stands.
        for variable, name in (("DATA", ".data"), ("CACHE", ".cache"), ("CONFIG", ".config")):
            os.environ.setdefault(f"WANDB_{variable}_DIR", str(folder / name))
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,  # host, user, command line, paths
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
            host="",
            init_timeout=20,
        )
        try:
            self._run = wandb.init(
                dir=str(self._root.absolute()),
                mode=self._mode,
                config=redact(config),
                settings=settings,
                reinit="create_new",
                id=attempt(folder, f"{self._names['group']}-{self._shard}"),
                **self._names,
            )
        except (wandb.Error, OSError) as problem:
            raise ConfigError(
                f"wandb could not start ({problem}). Use logger.mode=offline and `wandb sync` later, or logger=none."
            ) from problem
        log.info("wandb (%s): %s", self._mode, self._run.dir)

    def log(self, values: Mapping[str, float]) -> None:
        if self._run is not None:
            step = dict(values)
            self._send(lambda run: run.log(step))

    def finish(self, table: Sequence[Mapping[str, Any]] = (), failed: bool = False) -> None:
        until = time.monotonic() + PATIENCE_S
        if self._run is not None:
            last: list[Callable[[Any], object]] = [lambda run: run.log({"results": _table(table)})] if table else []
            for act in (*last, lambda run: run.finish(exit_code=int(failed))):
                self._send(act, until - time.monotonic())
        if self._thread is not None:
            self._send(None, until - time.monotonic())
            self._thread.join(max(until - time.monotonic(), 0))
            if self._left_out or self._thread.is_alive():
                log.warning(
                    "wandb was too slow: its run lacks steps (%d) or its end; the store lacks none", self._left_out
                )
        self._run = self._thread = None

    def _send(self, act: Callable[[Any], object] | None, wait_s: float = 0.0) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(self._run,), name="wandb", daemon=True)
            self._thread.start()
        try:
            self._mail.put(act, block=wait_s > 0, timeout=wait_s if wait_s > 0 else None)
        except queue.Full:
            self._left_out += 1

    def _work(self, run: Any) -> None:
        """In a thread of its own. A viewer's failure must not cost the run its results."""
        while (act := self._mail.get()) is not None:
            if self._run is None:
                continue
            try:
                act(run)
            except Exception as problem:  # noqa: BLE001 - whatever wandb raises
                log.warning("wandb failed (%s); tracking stops here, the results go on into the store", problem)
                self._run = None


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    import wandb

    columns = list(rows[0])
    return wandb.Table(columns=columns, data=[[row[column] for column in columns] for row in rows])


def group_of(root: Path) -> str:
    """The group of a result folder's runs: its name, and a digest of where it is."""
    place = str(root.absolute())
    return (
        f"{re.sub(r'[^A-Za-z0-9_-]+', '-', root.absolute().name)[:40]}-{hashlib.sha256(place.encode()).hexdigest()[:6]}"
    )


def attempt(folder: Path, name: str) -> str:
    """`name` with the first number that no run of this folder has taken; any number of processes may ask at once."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", name)
    taken = folder / ".attempts"
    taken.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (taken / f"{name}-{number}").mkdir()
        except FileExistsError:
            number += 1
            continue
        return f"{name}-{number}"
