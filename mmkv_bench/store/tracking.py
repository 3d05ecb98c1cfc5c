"""Optional trackers that show a run while it goes on. A tracker is a viewer: the record is the result store alone.

`logger=none` does nothing. `logger=wandb` writes an offline run under `<root>/wandb` (show it later with `wandb sync`);
`mode=online` checks first that the server answers and that a key is configured, because wandb itself keeps a process
alive for many minutes when it cannot reach its server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from mmkv_bench.errors import ConfigError, nearest
from mmkv_bench.store import reachability
from mmkv_bench.store.redaction import redact

log = logging.getLogger(__name__)

MODES = ("offline", "online")


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
    """The tracker `config` asks for: `name` (none | wandb), and for wandb `mode`, `project`, `entity`, `group`, `run`.

    Raises ConfigError for anything else, and at once, before any work, when mode=online cannot work.
    """
    config = dict(config)
    name = config.pop("name", "none") or "none"
    if name == "none":
        return NoTracker()
    if name != "wandb":
        raise ConfigError(f"logger {name!r} is not known; {nearest(str(name), ('none', 'wandb'))}")
    allowed = ("mode", "project", "entity", "group", "run")
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
    """Writes a Weights & Biases run. A failure of wandb after the start is warned about once and ends tracking only."""

    def __init__(
        self,
        root: Path,
        mode: str = "offline",
        project: str = "mmkv_bench",
        entity: str | None = None,
        group: str | None = None,
        run: str | None = None,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"logger.mode={mode!r} is not known; {nearest(str(mode), MODES)}")
        if mode == "online":
            reachability.check_online()
        self._root, self._mode = root, mode
        self._names = {"project": project, "entity": entity, "group": group, "name": run}
        self._run: Any = None

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
                **self._names,
            )
        except (wandb.Error, OSError) as problem:
            raise ConfigError(
                f"wandb could not start ({problem}). Use logger.mode=offline and `wandb sync` later, or logger=none."
            ) from problem
        log.info("wandb (%s): %s", self._mode, self._run.dir)

    def log(self, values: Mapping[str, float]) -> None:
        if self._run is not None:
            self._guard(lambda: self._run.log(dict(values)))

    def finish(self, table: Sequence[Mapping[str, Any]] = (), failed: bool = False) -> None:
        if self._run is None:
            return
        if table:
            import wandb

            columns = list(table[0])
            rows = [[row[column] for column in columns] for row in table]
            self._guard(lambda: self._run.log({"results": wandb.Table(columns=columns, data=rows)}))
        if self._run is not None:
            self._guard(lambda: self._run.finish(exit_code=int(failed)))
        self._run = None

    def _guard(self, act: Any) -> None:
        """A viewer's failure must not cost the run its results."""
        try:
            act()
        except Exception as problem:  # noqa: BLE001 - whatever wandb raises
            log.warning("wandb failed (%s); tracking stops here, the results go on into the store", problem)
            self._run = None
