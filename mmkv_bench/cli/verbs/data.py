"""`mmkv-bench data`: which datasets there are, and whether the data of one are there.

Nothing is downloaded and no model is loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import Parser
from mmkv_bench.config.files import content
from mmkv_bench.config.schema import options as config_options
from mmkv_bench.errors import ConfigError, nearest

if TYPE_CHECKING:
    from mmkv_bench.evaluation.data_check import DataReport

SUMMARY = "which datasets there are, and whether the data of one are there; downloads nothing"


def options(parser: Parser) -> None:
    """Action and datasets."""
    parser.add_argument(
        "what",
        choices=("list", "check"),
        help="list: every dataset with samples, size, judge, and whether small data of our own making stand in; "
        "check: where a run would take the data from, what is there and what is missing, licence and size; exit code 0 "
        "when a run can start without a connection, 2 when something is missing or damaged (of parquet files the first "
        "and the last rows are read)",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="dataset | key=value",
        help="datasets to check, and their settings: data.root=<folder> for <folder>/<dataset>/ in the upstream schema "
        "instead of the hub, data=fixture for data of our own making, dataset.split=<name>, every other key of a dataset",
    )
    parser.add_argument(
        "--online", action="store_true", help="ask the hub for commit, licence and size; else no connection is made"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.examples("mmkv-bench data list", "mmkv-bench data check docvqa textvqa data.root=/data/mmkv")


def answer(given: argparse.Namespace) -> int:
    """0 ready, 2 refused or something is missing."""
    if given.what == "check":
        return _check(given.names, given.json, given.online)
    if given.names:
        raise ConfigError(f"list takes no {given.names[0]!r}; to look at one dataset: mmkv-bench data check <name>")
    return _list(given.json)


def _list(as_json: bool) -> int:
    from mmkv_bench.datasets import fixtures

    made = fixtures.names()
    rows: list[dict[str, Any]] = []
    for name in config_options("dataset"):
        about = content("dataset", name).get("about") or {}
        rows.append(
            {
                "dataset": name,
                "samples": about.get("samples"),
                "size": str(about.get("size") or ""),
                "judge": str(about.get("judge") or "none"),
                "fixture": name in made,
                "title": str(about.get("title") or ""),
            }
        )
    if as_json:
        print(json.dumps(rows))
        return 0
    width = max(len(row["dataset"]) for row in rows)
    print(f"{'dataset':{width}}  samples  judge     fixture  what")
    for row in rows:
        fixture, samples = "yes" if row["fixture"] else "-", row["samples"] or "-"
        print(f"{row['dataset']:{width}}  {samples!s:>7}  {row['judge']:8}  {fixture:7}  {row['title']}")
    return 0


def _check(words: Sequence[str], as_json: bool, online: bool) -> int:
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    known = config_options("dataset")
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no dataset {name!r}; {nearest(name, known)}")
    if not names:
        raise ConfigError(f"check needs the name of a dataset; allowed: {', '.join(known)}")
    from mmkv_bench.config.compose import compose
    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.evaluation.data_check import check, has_fixture, repository_of
    from mmkv_bench.evaluation.environment import go_offline

    config = compose([f"dataset=[{','.join(dict.fromkeys(names))}]", *overrides])
    if not online:
        go_offline()
    documents = []
    for name, node in config.datasets.items():
        spec = spec_from_config(str(name), dict(node), vars(config.data))
        about = node.get("about") or {}
        found = check(spec, about)
        document = {
            "dataset": spec.dataset,
            "task": spec.name,
            "ready": found.ready,
            "title": about.get("title"),
            "source": about.get("hub"),
            "licence": about.get("licence"),
            "expected_size": about.get("size"),
            "expected_samples": about.get("samples"),
            "judge": about.get("judge", "none"),
            "fixture": has_fixture(str(name)),
            "columns_read": list(spec.columns),
            **vars(found),
        }
        if online and (repository := repository_of(spec)) is not None:
            from mmkv_bench.datasets.hub import ask

            document["hub"] = ask(repository) | {"repository": repository}
        documents.append(document)
        if not as_json:
            print("\n".join(_report(document, found)))
    if as_json:
        print(json.dumps(documents))
    return 0 if all(document["ready"] for document in documents) else 2


def _report(document: Mapping[str, Any], found: DataReport) -> list[str]:
    expected = document["expected_samples"]
    lines = [
        f"{document['dataset']}: {document['title'] or document['task']}",
        f"  task      {document['task']}{', ' + found.config if found.config else ''}",
        f"  source    {document['source'] or 'as its task says'}",
        f"  licence   {document['licence'] or 'not known here'}",
        f"  size      {document['expected_size'] or 'not known here'}{f'; {expected} samples' if expected else ''}",
        f"  judge     {document['judge']}",
        f"  here      {found.place}{_amount(found)}",
    ]
    if found.columns is not None:
        further = [name for name in found.columns if name not in document["columns_read"]]
        read = ", ".join(name for name in document["columns_read"] if name in found.columns) or "not declared"
        lines.append(f"  columns   read: {read}{'; further: ' + ', '.join(further) if further else ''}")
    if found.media is not None:
        lines.append(f"  videos    {found.media}")
    if document.get("hub"):
        lines.append(f"  hub       {_hub(document['hub'])}")
    lines += [f"  note      {note}" for note in found.notes]
    lines += [f"  missing   {problem}" for problem in found.missing]
    if found.missing and document["fixture"]:
        lines.append("  trial     data=fixture takes small data of our own making in the same schema")
    return [*lines, f"  {'ready' if found.ready else 'not ready'}"]


def _amount(found: DataReport) -> str:
    parts = []
    if found.files is not None:
        parts.append(f"{found.files} file{'s' * (found.files != 1)}")
    if found.bytes is not None:
        parts.append(_bytes(found.bytes))
    if found.rows is not None:
        parts.append(f"{found.rows} rows")
    return f" ({', '.join(parts)})" if parts else ""


def _hub(hub: Mapping[str, Any]) -> str:
    if "error" in hub:
        return hub["error"]
    gated = ", gated" if hub["gated"] else ""
    return (
        f"{hub['repository']} at {str(hub['commit'])[:12]} of {hub['changed']}: {hub['files']} files, "
        f"{_bytes(hub['bytes'])}, licence {hub['licence'] or 'none stated'}{gated}"
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
