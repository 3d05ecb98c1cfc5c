"""Config source of Hydra for `conf/` and further config folders: methods with their parts, datasets out of tables.

A config source of Hydra's own kind. It reads folders as Hydra's does, and hands out what `files.read` makes of a file. In
the groups of which a run may choose several a file's values belong below `<group>s.<name>`, without a header that says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mmkv_bench.config import tables
from mmkv_bench.config.files import read
from mmkv_bench.config.run_config import composed_schema
from mmkv_bench.config.schema import LIST_GROUPS, conf_dir
from mmkv_bench.file_state import State

SCHEME = "mmkv"


class FolderSource(ConfigSource):
    """A folder of config groups."""

    @staticmethod
    def scheme() -> str:
        return SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        file = Path(self.path, group, f"{name}.yaml")
        content = read(file.parent, name, _loaded)
        if content is None:
            raise ConfigLoadError(f"Config not found : {file}")
        header = self._get_header_dict(file.read_text(encoding="utf-8")[:512] if file.is_file() else "")
        if group in LIST_GROUPS and header["package"] is None:
            header["package"] = f"{group}s.{name}"
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), header)

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        file = Path(self.path, self._normalize_file_name(config_path))
        return file.is_file() or file.stem in tables.names(file.parent)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        folder = Path(self.path, config_path)
        names: set[str] = set()
        if results_filter in (None, ObjectType.GROUP):
            names |= {entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name != tables.FOLDER}
        if results_filter in (None, ObjectType.CONFIG):
            names |= {file.stem for file in folder.glob("*.yaml")} | tables.names(folder)
        return sorted(names)


class OwnFolder(SearchPathPlugin):
    """Has `conf/` read by `FolderSource`; the search paths of other programs are left alone."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path.removeprefix("file://") == str(conf_dir()):
                element.path = located(element.path)


def located(folder: str) -> str:
    """A folder of the search path (`file://...`, or without a scheme) as `FolderSource` takes it."""
    scheme, divided, rest = folder.partition("://")
    return f"{SCHEME}://{rest if divided else folder}" if not divided or scheme == "file" else folder


def register() -> None:
    """Tell Hydra of both, and of the schema that `conf/config.yaml` extends, for this process."""
    for plugin in (FolderSource, OwnFolder):
        Plugins.instance().register(plugin)
    ConfigStore.instance().store("schema", composed_schema(), provider="mmkv_bench")


def _loaded(file: Path) -> Mapping[str, Any]:
    return OmegaConf.to_container(_parsed(file, State.of(file.stat())), resolve=False)


@cache
def _parsed(file: Path, state: State) -> Any:
    return OmegaConf.load(file)
