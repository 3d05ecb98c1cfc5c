"""Fixtures for `data=fixture`: small data made by this project in the upstream schema, one archive per dataset.

An archive has the layout that `data.root=<folder>` expects (see `local_data.py`): `data/<split>-*.parquet` with the upstream
columns and types, and videos below `media/`, which replaces $HF_HOME. `python -m tools.fixtures` makes the archives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from mmkv_bench.errors import ConfigError, DataError, nearest
from mmkv_bench.file_state import cache_dir

ARCHIVES = Path(__file__).parent / "fixture_data"


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(file.stem for file in ARCHIVES.glob("*.zip")))


def folder(name: str) -> Path:
    """Return the folder with a dataset's fixture; the first call unpacks its archive into the cache.

    Raises:
        ConfigError: the dataset has no fixture.
        DataError: the cache cannot be written.
    """
    if name not in names():
        raise ConfigError(
            f"dataset {name!r} has no fixture; {nearest(name, names())}; choose another dataset, or give the data "
            "with data.root=<folder>"
        )
    archive = ARCHIVES / f"{name}.zip"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:12]
    path = cache_dir() / "fixtures" / f"{name}-{digest}"
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{name}-"))
        try:
            shutil.unpack_archive(archive, partial)
            partial.chmod(0o755)
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if not path.is_dir():  # another process may have unpacked it meanwhile
            raise DataError(
                f"the fixture of {name} cannot be written to {path.parent} ({error.strerror}); make room there, or set "
                "MMKV_BENCH_CACHE to a writable folder"
            ) from error
    return path
