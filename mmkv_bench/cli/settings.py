"""The text of `mmkv-bench run --help`. Imports nothing heavy: it must answer at once."""

from __future__ import annotations

from mmkv_bench import __version__
from mmkv_bench.config.schema import Data, Gate, Judge, Logger, Model, Slurm, groups, keys, options

_GROUP_HELP = {
    "model": "what is benchmarked; model=hf model.path=<folder or hub id> for any supported one",
    "dataset": "what is asked; one or several",
    "method": "what compresses the cache; one or several",
    "data": "where datasets come from",
    "judge": "which model scores what needs one",
    "logger": "where progress is tracked besides the rows",
    "launcher": "where -m sends its jobs",
    "experiment": "a prepared set of choices and values",
}

_FLAGS = {
    "-h, --help": "this text; mmkv-bench --help lists the other verbs",
    "--json": "end stdout with one JSON document",
    "-m, --multirun": "one run per element of comma lists: -m model=tiny,hf seed=0,1",
    "--config-dir DIR": "a further folder of config groups (model/, experiment/, ...)",
    "-c, --cfg job": "print the composed configuration and stop",
}

_EXAMPLES = """\
  python -m mmkv_bench                                             the embedded model, mmshift, 64 entries per KV head
  python -m mmkv_bench method=snapkv budget=32
  python -m mmkv_bench 'method=[full,snapkv,mmshift]' 'budget=[16,32,0.2]' 'dataset=[pages_walk,pages_lookup]'
  python -m mmkv_bench method=snapkv methods.snapkv.window=16
  python -m mmkv_bench 'method=[h2o,keydiff]' methods.keydiff.reading=released
  python -m mmkv_bench method=mmshift 'variants.g3={base: mmshift, gamma: 3}'
  python -m mmkv_bench model=hf model.path=/models/my-vlm 'protocol=[paper,strict]' limit=100
  python -m mmkv_bench experiment=demo --json"""


def usage() -> str:
    """The help text: groups with their options as they lie in conf/, keys from the schema, flags and examples."""
    order = [*_GROUP_HELP, *(group for group in groups() if group not in _GROUP_HELP)]
    lines = [
        f"mmkv_bench {__version__}: what KV-cache compression costs multimodal models, in counted budgets.",
        "",
        "usage: mmkv-bench [run] [group=choice ...] [key=value ...] [flags]     (or: python -m mmkv_bench ...)",
        "",
        "groups (group=choice, 'group=[a,b]' where several are taken)",
    ]
    for group in order:
        lines += [f"  {group:<12}{_GROUP_HELP.get(group, '')}", *_wrapped(", ".join(options(group)))]
    lines += ["", "keys (key=value)", *_table(keys())]
    lines += ["", "keys of the model (model.<key>=value)", *_table(keys(Model))]
    lines += ["", "keys of the data (data.<key>=value)", *_table(keys(Data))]
    lines += ["", "keys of the judge (judge.<key>=value)", *_table(keys(Judge))]
    lines += ["", "keys of the gate (gate.<key>=value)", *_table(keys(Gate))]
    lines += ["", "keys of the logger (logger.<key>=value)", *_table(keys(Logger))]
    lines += [
        "",
        "keys of a sweep's jobs (slurm.<key>=value; hydra.launcher.<key> is what sbatch gets)",
        *_table(keys(Slurm)),
    ]
    lines += ["", "flags", *(f"  {flag:<18}{text}" for flag, text in _FLAGS.items())]
    lines += ["", "examples", _EXAMPLES]
    return "\n".join(lines)


def _table(described: dict[str, tuple[str, str | tuple[str, ...]]]) -> list[str]:
    lines = []
    for key, (text, allowed) in described.items():
        words = allowed if isinstance(allowed, str) else " | ".join(allowed)
        lines.append(f"  {key:<18}{text}" + (f" [{words}]" if words else ""))
    return lines


def _wrapped(text: str, indent: int = 14, width: int = 110) -> list[str]:
    from textwrap import wrap

    return wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent)
