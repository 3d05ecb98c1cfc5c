"""Pages of data sets: `docs/datasets.md` lists them and `docs/datasets/<name>.md` describes each benchmark.

`python -m tools.datasets_page` writes them, `--check` compares them. Everything is read from `conf/dataset` (files and tables)
and from the YAML files of the tasks named there. Data sets of a large family (names with a common beginning) share a page: it
states common facts once, and the differences in a table.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mmkv_bench.config.files import content, options
from mmkv_bench.errors import ConfigError
from tools.pages import command

ABOUT = ("title", "hub", "licence", "size", "samples", "papers", "scale", "generation", "judge", "traps")
"""Keys that the `about` of every dataset has."""
ORDER = (
    "title",
    "task",
    "code",
    "hub",
    "split",
    "licence",
    "size",
    "samples",
    "papers",
    "metrics",
    "scale",
    "generation",
)
LAST = (
    "judge",
    "needs",
    "folder",
    "media",
    "placeholders",
    "measures",
    "clusters",
    "columns",
    "traps",
    "exercised",
    "source",
)
NAMES = {
    "code": "task's code",
    "hub": "data",
    "title": "what",
    "generation": "tokens to generate",
    "columns": "columns that are read",
    "folder": "folder below `data.root`",
    "placeholders": "`<image>` in the text",
}
NOTE = """\
Made by `make docs` from `conf/dataset` and the tasks named there; do not edit. [All data sets](../datasets.md) says where data
are looked for."""
ANY = "lmms_eval"
MANY = 5  # datasets of a family that share a section
JUDGES = {
    "none": "no judge",
    "needed": "needed: without one (`judge=none`) answers are generated and not judged",
    "fallback": "for answers that no rule reads; without one these are not judged",
}
USES = {
    "interleave": "an image stands there (`placeholders: interleave`; `remove` puts images before a text without the word, "
    "`keep` before the text as it is)",
    "remove": "taken away, images stand before the text (`placeholders: remove`)",
}


@dataclass(frozen=True)
class Dataset:
    """One dataset file as the page shows it: texts by key."""

    name: str
    judge: str
    facts: Mapping[str, str]


def pages() -> dict[str, str]:
    """Return path below docs/ -> Markdown: the index and a page for each benchmark."""
    datasets = [read(name) for name in options("dataset") if name != ANY]
    lines = [
        "# Data sets",
        "",
        "Made by `make docs` from the files in `conf/dataset` and the tasks they name; do not edit. Sizes, licences and",
        "numbers of samples are as of our knowledge: no hub was reached from here. `python -m mmkv_bench data check <name>`",
        "says what is there on your machine, and with `--online` what the hub says.",
        "",
        "- `dataset=<name>` takes the data from the hub, `data.root=<folder>` from `<folder>/<name>/` (or the folder below",
        "  `data.root` that its page names) in the upstream schema: a clone of the upstream repository,",
        "  `data/<split>-*.parquet`, or what `save_to_disk` writes; videos below `<folder>/<name>/media/`, which stands for",
        "  `$HF_HOME`.",
        "- `data=fixture` takes small data of our own making in the upstream schema. Its scores mean nothing, and its tables",
        "  have a name of their own (`<name>_fixture`).",
        "- Any other task of lmms-eval: `dataset=lmms_eval dataset.task=<task>`.",
        "- A length of a paper is an override: `dataset.generation.max_new_tokens=64`.",
        "",
        "| dataset | what | samples | metric | tokens | judge | fixture |",
        "|---|---|---|---|---|---|---|",
    ]
    sections = _sections(datasets)
    for heading, members in sections:
        for d in members:
            cells = [
                f"[{d.name}](datasets/{heading}.md)",
                *(_cell(d.facts[k]) for k in ("title", "samples", "metrics")),
            ]
            lines.append(f"| {' | '.join([*cells, _here(d), d.judge, 'yes' if _made(d.name) else 'no'])} |")
    return {"datasets.md": "\n".join(lines) + "\n"} | {
        f"datasets/{heading}.md": _page(heading, members) for heading, members in sections
    }


def _page(heading: str, members: Sequence[Dataset]) -> str:
    body = _single(members[0]) if len(members) == 1 else _family(members)
    return "\n".join([f"# {heading}", "", *body, "", NOTE]) + "\n"


def read(name: str) -> Dataset:
    """Return a dataset file with the YAML of its task.

    Raises:
        ConfigError: `about` or an entry of it is missing, or states another answer length than a run uses.
    """
    node = content("dataset", name)
    about = dict(node.get("about") or {})
    lacking = [key for key in ABOUT if about.get(key) in (None, "")]
    if lacking:
        raise ConfigError(f"dataset {name} (conf/dataset) says nothing under about.{lacking[0]}; add it")
    here, length = about["generation"].get("here"), (node.get("generation") or {}).get("max_new_tokens")
    if str(here).partition(",")[0] != str(length):
        raise ConfigError(
            f"dataset {name} (conf/dataset) generates {length} tokens and says {here} under about.generation.here; make it one"
        )
    config, shipped = _task(name, node)
    facts = {key: _words(value) for key, value in about.items() if key != "columns"}
    facts |= {
        "task": f"`{node['task']}`",
        "code": shipped,
        "split": str(node.get("split") or config.get("test_split") or config.get("validation_split")),
        "metrics": ", ".join(f"`{metric}`" for metric in node.get("metrics") or ()),
        "generation": "; ".join(f"{who}: {what}" for who, what in about["generation"].items()),
        "judge": JUDGES.get(str(about["judge"]), str(about["judge"])),
        "traps": "\n".join(f"  - {trap}" for trap in about.get("traps") or ()),
        "clusters": f"samples with one `{node['cluster_key']}`" if node.get("cluster_key") else "",
        "folder": f"`{node['folder']}`" if node.get("folder") else "",
        "placeholders": USES.get(str(node.get("placeholders")), ""),
        "measures": ", ".join(f"`{measure}`" for measure in node.get("measures") or ()),
        "columns": ", ".join(f"`{column}`" for column in about.get("columns") or ()),
        "exercised": _exercised(name, about.get("needs")),
    }
    facts = {key: value for key, value in facts.items() if (value and value != "none") or key == "metrics"}
    return Dataset(name, str(about["judge"]), facts)


def _sections(datasets: Sequence[Dataset]) -> list[tuple[str, list[Dataset]]]:
    """Map each heading to its datasets; a large family has one heading."""
    found: list[tuple[str, list[Dataset]]] = []
    for family, members in groupby(datasets, key=lambda d: d.name.partition("_")[0]):
        many = list(members)
        found += [(family, many)] if len(many) >= MANY else [(d.name, [d]) for d in many]
    return found


def _single(dataset: Dataset) -> list[str]:
    return [line for key in _keys(dataset.facts) for line in _bullet(key, dataset.facts[key])]


def _family(members: Sequence[Dataset]) -> list[str]:
    """Return the text of a family: common facts as bullets, differences as columns of a table, and some members' traps below."""
    keys = list(dict.fromkeys(key for d in members for key in _keys(d.facts)))
    shared = [key for key in keys if len({d.facts.get(key) for d in members}) == 1]
    named_alike = all(d.facts["task"] == f"`{d.name}`" for d in members)
    own = [key for key in keys if key not in shared and key != "traps" and not (key == "task" and named_alike)]
    lines = [line for key in shared for line in _bullet(key, members[0].facts[key])]
    lines += ["", f"| dataset | {' | '.join(_label(key) for key in own)} |", f"|---|{'---|' * len(own)}"]
    lines += [f"| `{d.name}` | {' | '.join(_cell(d.facts.get(key, '')) for key in own)} |" for d in members]
    if "traps" in shared or not any("traps" in d.facts for d in members):
        return lines
    lines += ["", "Traps:", ""]
    said: dict[str, list[str]] = {}
    for d in members:
        for trap in d.facts.get("traps", "").splitlines():
            said.setdefault(trap.strip(), []).append(d.name)
    for trap, names in said.items():
        where = "" if len(names) == len(members) else f" ({', '.join(names)})"
        lines.append(f"{trap}{where}")
    return lines


def _keys(facts: Mapping[str, str]) -> list[str]:
    others = [key for key in facts if key not in (*ORDER, *LAST)]
    return [key for key in (*ORDER, *others, *LAST) if facts.get(key)]


def _bullet(key: str, value: str) -> list[str]:
    return (
        [f"- {_label(key)}:", *value.splitlines()] if "\n" in value or key == "traps" else [f"- {_label(key)}: {value}"]
    )


def _label(key: str) -> str:
    return NAMES.get(key, key)


def _here(dataset: Dataset) -> str:
    return dict(part.partition(": ")[::2] for part in dataset.facts["generation"].split("; ")).get("here", "")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_words(inner)}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _exercised(name: str, needs: str | None) -> str:
    from mmkv_bench.datasets.drawn_page_tasks import PAGE_TASKS

    if name in PAGE_TASKS:
        return "the data themselves, with the embedded model"
    parts = "loading and prompts in tests, metrics where what they need is there" if needs else ""
    small = f"{parts or 'loading, prompts and metrics in tests'}, on small data of our making (`data=fixture`)"
    return f"{small if _made(name) else 'nothing: no small data are made of it'}; hub data: not here"


def _made(name: str) -> bool:
    from mmkv_bench.datasets import fixtures

    return name in fixtures.names()


def _task(name: str, node: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the task's YAML as data, and its source."""
    from mmkv_bench.datasets.specs import spec_from_config
    from mmkv_bench.datasets.task_yaml import OWN_FOLDER, plain_config, task_file

    plain = {key: value for key, value in node.items() if key != "size"}
    path = task_file(spec_from_config(name, plain))
    own = path.is_relative_to(OWN_FOLDER)
    shipped = f"of this project (`mmkv_bench/datasets/tasks/{path.parent.name}`)" if own else "of lmms-eval"
    return plain_config(path), shipped


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them with `--check`."""
    return command("datasets_page", __doc__, pages, arguments)


if __name__ == "__main__":
    sys.exit(main())
