"""Validate records of Every Eval Ever against the schema in that project's package, which needs Python 3.12 or newer.

    python tools/check_export.py                      exports results/tiny/large and validates the records
    python tools/check_export.py records/data         validates existing records

The package's wheel is downloaded for Python 3.12 without its dependencies, and only the schema is read from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jsonschema import Draft7Validator

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "every-eval-ever==0.3.0"
SCHEMA = "every_eval_ever/schemas/eval.schema.json"


def schema(folder: Path) -> dict:
    """Return the schema in the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run([*command, "--python-version", "3.12", "--no-deps", "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("every_eval_ever-*.whl")
    with zipfile.ZipFile(wheel) as content:
        return json.loads(content.read(SCHEMA))


def faults(validator: Draft7Validator, folder: Path) -> tuple[int, list[str]]:
    """Return the number of records, and what is wrong with them."""
    found, files = [], sorted(folder.rglob("*.json"))
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        found += [f"{file}: {error.json_path}: {error.message[:200]}" for error in validator.iter_errors(record)]
    return len(files), found


def main() -> int:
    """Return 0 if all records are valid."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        validator = Draft7Validator(schema(scratch))
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else scratch / "records"
        if len(sys.argv) == 1:
            words = [str(ROOT / "results/tiny/large"), "--out", str(folder), "--organization", "mmkv_bench"]
            subprocess.run([sys.executable, "-m", "tools.every_eval_ever", *words], check=True, cwd=ROOT)
        count, wrong = faults(validator, folder)
    print(
        "\n".join(
            [*wrong[:20], f"{count} records, {len(wrong)} faults, schema {validator.schema['version']} of {PACKAGE}"]
        )
    )
    return 1 if wrong or not count else 0


if __name__ == "__main__":
    sys.exit(main())
