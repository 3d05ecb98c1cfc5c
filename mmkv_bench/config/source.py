"""Hydra's config source for `conf/` and further config folders: methods with their parts, datasets from tables.

It reads folders like Hydra's source, but returns the content that `files.read` makes from a file. In groups of which a run may
choose several, a file's values go below `<group>s.<name>`, without a header in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mmkv_bench.config.files import TABLE_FOLDER, conf_dir, members, read
from mmkv_bench.config.run_config import composed_schema
from mmkv_bench.config.schema import LIST_GROUPS
from mmkv_bench.file_state import State

SCHEME = "mmkv"


class FolderSource(FileConfigSource):
    """A folder of config groups, as a source of Hydra configs."""

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

    def is_config(self, config_path: str) -> bool:
        file = Path(self.path, self._normalize_file_name(config_path))
        return super().is_config(config_path) or file.stem in members(file.parent)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        inside = set() if results_filter == ObjectType.GROUP else members(Path(self.path, config_path))
        return sorted({*super().list(config_path, results_filter)} - {TABLE_FOLDER} | inside)


class OwnFolder(SearchPathPlugin):
    """A plugin that makes `FolderSource` read `conf/`. The search paths of other programs stay unchanged."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for element in search_path.get_path():
            if element.path.removeprefix("file://") == str(conf_dir()):
                element.path = located(element.path)


def located(folder: str) -> str:
    """Give a folder of the search path the scheme of `FolderSource` in place of `file://` or no scheme. Other schemes stay."""
    scheme, divided, rest = folder.partition("://")
    return f"{SCHEME}://{rest if divided else folder}" if not divided or scheme == "file" else folder


def register() -> None:
    """Register both classes with Hydra, and the schema that `conf/config.yaml` extends. This lasts as long as the process."""
    for plugin in (FolderSource, OwnFolder):
        Plugins.instance().register(plugin)
    ConfigStore.instance().store("schema", composed_schema(), provider="mmkv_bench")


def _loaded(file: Path) -> Mapping[str, Any]:
    return OmegaConf.to_container(_parsed(file, State.of(file.stat())), resolve=False)


@cache
def _parsed(file: Path, state: State) -> Any:
    return OmegaConf.load(file)
