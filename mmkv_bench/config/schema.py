"""The configuration of a run: every key with its meaning and its allowed values.

Values are in `conf/` (YAML); this file has types, defaults, help texts and allowed values. The help of the command line, the
checks of `plan/validate.py` and Hydra's type checks all read these dataclasses, so each key is described once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from mmkv_bench.errors import ConfigError
from mmkv_bench.protocols import DEFAULT as PROTOCOL
from mmkv_bench.protocols import NAMES as PROTOCOLS
from mmkv_bench.protocols import StreamSettings

READINGS = ("paper", "released")
SWITCH = ("on", "off")
CHANGED = "changed"
RETRIES = ("oom", "timeout", "nan", "error", CHANGED)
QUALITY, EFFICIENCY = "quality", "efficiency"
SCENARIOS = (QUALITY, EFFICIENCY)
ONE_BY_ONE, TOGETHER = BATCH_PREFILLS = ("one_by_one", "together")
MAX = "max"
SHORTEST = 16
"""Number of tokens of the shortest prompt that scenario=efficiency makes."""

LIST_GROUPS = ("method", "dataset")
"""Config groups of which a run may choose several. Their content becomes `methods.<name>`, `datasets.<name>`."""

PACKAGE_SCHEME = "pkg://"
FETCHED_SCHEME = "fetched://"


_POSITIVE_WHOLE_NUMBER = "a whole number >= 1"
_COUNT_OR_NULL = f"{_POSITIVE_WHOLE_NUMBER} or null"


def _key(default: Any, help: str, allowed: str | tuple[str, ...] = "") -> Any:
    """Declare a field of the configuration with its help text.

    allowed: a tuple of allowed words, or a phrase that `ranges` reads, such as `whole numbers >= 1`.
    """
    metadata = {"help": help, "allowed": "true, false" if isinstance(default, bool) else allowed}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Model:
    """A Hugging Face folder or hub id, and how to load it."""

    name: str = _key("tiny", "name shown in tables")
    path: str | None = _key(None, "local folder, hub id, or pkg://package/folder", "a folder or hub id")
    revision: str | None = _key(None, "hub revision (branch, tag or commit)")
    dtype: str = _key(
        "auto", "weights and cache dtype; auto = the checkpoint's", ("auto", "float32", "bfloat16", "float16")
    )
    attention: str = _key(
        "sdpa", "attention implementation under the compressed cache", ("sdpa", "eager", "flash_attention_2")
    )
    device: str = _key("auto", "device of the model; auto = cuda if there is one", ("auto", "cpu", "cuda"))
    threads: int | None = _key(
        None,
        "CPU threads; null = OMP_NUM_THREADS, or all cores, or one for a model that gains nothing",
        _POSITIVE_WHOLE_NUMBER,
    )
    device_map: Any = _key(None, "accelerate device map for models larger than one device")
    min_pixels: int | None = _key(None, "image pixels the processor scales up to", _POSITIVE_WHOLE_NUMBER)
    max_pixels: int | None = _key(None, "image pixels the processor scales down to", _POSITIVE_WHOLE_NUMBER)
    max_prompt_tokens: int | None = _key(
        None, "maximum; longer prompts become rows with an error", _POSITIVE_WHOLE_NUMBER
    )
    weights: str = _key(
        "hub", "hub: from model.path; a folder: from there; random: only the shape is used", "hub, random, or a folder"
    )
    tokenizer: str | None = _key(None, "folder of the tokenizer of a GGUF file; null = the file's", "a folder")
    template: str | None = _key(
        None, "plain: a text model's prompts without template; null = the checkpoint's chat template", "plain"
    )
    adapter: str | None = _key(None, "LoRA adapter added to the weights; null = none", "a folder as PEFT writes it")
    layers: int | None = _key(
        None, "random weights: layers of the text model and of the vision tower", _POSITIVE_WHOLE_NUMBER
    )
    frames: int | None = _key(None, "frames taken from a video, evenly spaced; null = 32", _POSITIVE_WHOLE_NUMBER)
    video_max_pixels: int | None = _key(
        None, "pixels of one video frame the processor scales down to", _POSITIVE_WHOLE_NUMBER
    )
    shape: Mapping[str, Any] | None = _key(
        None, "configuration of the checkpoint, as data (conf/model/*.yaml), for random weights"
    )
    processor: Mapping[str, Any] | None = _key(
        None, "settings of the checkpoint's processor, as data, for random weights"
    )
    gates: Any = _key(None, "full-cache scores that papers print for this model, as data")
    about: Mapping[str, Any] | None = _key(None, "facts for docs/models.md")


@dataclass(frozen=True)
class Data:
    """The origin of datasets. A dataset's own `dataset_path` takes precedence."""

    source: str = _key("upstream", "the task's own data, or small made-up data", ("upstream", "fixture"))
    root: str | None = _key(
        None, "folder with <root>/<dataset name>/ in the upstream schema instead of the hub", "a folder"
    )


@dataclass(frozen=True)
class Judge:
    """The model that scorers ask, only in the score stage."""

    kind: str = _key("none", "none, or an endpoint that speaks OpenAI's chat completions", ("none", "openai", "local"))
    model: str | None = _key(None, "model id that the endpoint accepts")
    url: str | None = _key(None, "base url, for example http://127.0.0.1:8000/v1")
    key_env: str | None = _key(None, "environment variable with the key; null sends none", "a variable's name")
    timeout_s: float = _key(
        60.0, "time limit of one attempt, from connecting to the answer's last byte [s]", "a number > 0"
    )
    retries: int = _key(4, "further attempts after a failure, with backoff", "a whole number >= 0")
    backoff_s: float = _key(
        1.0, "wait before the first further attempt [s]; doubled each time, with jitter", "a number >= 0"
    )
    concurrency: int = _key(8, "number of concurrent questions", _POSITIVE_WHOLE_NUMBER)
    temperature: float | None = _key(
        None,
        "temperature of the judge's sampling; null = each scorer's value (0, WorldQA 0.2)",
        "a number >= 0 or null",
    )
    cache: str | None = _key(None, "folder of the judge's answers; null = <out>/judge", "a folder")


@dataclass(frozen=True)
class Gate:
    """The full cache's score as a paper prints it. If a run reaches it, model and prompts are set up as in the paper."""

    expected: float | None = _key(
        None,
        "expected headline of full in the run's one dataset (its first metric); null = from the model's file",
        "a number or null",
    )
    tolerance: float | None = _key(
        None,
        "largest accepted difference, in the run's own scale (0.01 for accuracy in 0..1); null = from the model's file",
        "a number >= 0 or null",
    )


@dataclass(frozen=True)
class Stream:
    """Settings of protocol=stream, which reads a video, pictures or a text in chunks. The budget caps the cache after each
    chunk."""

    every: int | None = _key(8, "frames or pictures per chunk, or tokens of a text; null = all at once", _COUNT_OR_NULL)
    ask_at: tuple[float, ...] = _key(
        (1.0,),
        "share of the stream after which questions are asked, in whole chunks; a value, or a list (the stream is read once)",
        "numbers > 0, at most 1",
    )
    positions: str = _key(
        "kept",
        "positions of kept entries: the positions they were computed with, or consecutive ones up to the newest token's",
        ("kept", "compact"),
    )

    @property
    def settings(self) -> tuple[StreamSettings, ...]:
        """One set of stream settings per value of `ask_at` (the share of the stream after which the question is
        asked)."""
        return tuple(StreamSettings(self.every, float(share), self.positions) for share in dict.fromkeys(self.ask_at))


@dataclass(frozen=True)
class Logger:
    """Settings of the tracker, which gets running means and the final table in addition to the rows."""

    kind: str = _key("none", "none or wandb", ("none", "wandb"))
    mode: str = _key("offline", "wandb mode; online checks first that the server answers", ("offline", "online"))
    project: str = _key("mmkv-bench", "wandb project")
    entity: str | None = _key(None, "wandb entity")
    name: str | None = _key(None, "wandb run name")
    cells: bool = _key(False, "at the end, also one wandb run per cell, for filters and plots")


@dataclass(frozen=True)
class Slurm:
    """Requirements of jobs of a sweep with `launcher=slurm`, in addition to `hydra.launcher.<key>`, which goes to sbatch."""

    modules: tuple[str, ...] = _key((), "environment modules that each job loads; a name or a list", "names")
    container: str | None = _key(None, "image that jobs run in", "a file or a registry's name, as its runtime takes it")
    runtime: str = _key("pyxis", "what runs the image", ("pyxis", "apptainer"))
    mounts: tuple[str, ...] = _key((), "folders that the image sees; a value or a list", "/folder or /folder:/inside")
    python: str | None = _key(None, "Python of the jobs; null = this one, and `python` inside an image", "a program")
    srun: tuple[str, ...] = _key((), "further flags of srun; a value or a list", "--flag=value")
    models: Mapping[str, Mapping[str, Any]] | None = _key(
        None,
        "requests of one model's jobs, in addition to the others'",
        "{<model>: {<key of hydra.launcher>: <value>}}",
    )
    job_hours: float = _key(
        1.0,
        "maximum hours of a job with several datasets, at the rate of stored rows; 0: one dataset per job",
        "a number >= 0",
    )
    wait: bool = _key(True, "wait for the jobs, then score and print; false ends after sbatch")


@dataclass(frozen=True)
class Selection:
    """The samples of each dataset that a process answers: the first `limit` or the named samples, restricted to one shard."""

    limit: int | None = None
    samples: tuple[str, ...] | None = None
    shard: str = "0/1"


@dataclass(frozen=True)
class AnswerConfig:
    """Settings by which a process answers samples, one part of a `RunConfig`.

    Attributes:
        shares_prefill: whether all cells answer from one prefill.
        keeps_indices: whether rows say which entries stay, and not only how many.
        stream: settings of protocols that stream, one per value of `ask_at`.
    """

    model: Model
    selection: Selection
    shares_prefill: bool
    decode: str
    timeout_s: float | None
    fidelity: bool
    keeps_indices: bool
    fork_batch: int
    fork_memory: int | str | None
    stream: tuple[StreamSettings, ...]


@dataclass(frozen=True)
class MethodConfig:
    """The chosen methods and variants, one part of a `RunConfig`, which documents the attributes."""

    methods: Mapping[str, Mapping[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    folders: tuple[str, ...]
    reading: tuple[str, ...]
    baseline: str


@dataclass(frozen=True)
class GridConfig:
    """The values whose combinations are the cells of each method, one part of a `RunConfig`."""

    datasets: tuple[str, ...]
    protocol: tuple[str, ...]
    budget: tuple[int | float | str, ...]
    seed: tuple[int, ...]
    answering: AnswerConfig


@dataclass(frozen=True)
class EfficiencyConfig:
    """Settings of the passes of scenario=efficiency, one part of a `RunConfig`."""

    batch_prefill: str
    memory_limit: int | str | None
    new_tokens: int
    repeats: int
    order_seed: int


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run. Keys that take a value or a list are tuples. `plan/validate.py` checks the values.

    Attributes:
        methods, variants: name to the method's node as plain values. `${..parameter}` inside them is resolved once the reading is
            known.
        datasets: name to the dataset's node as plain values.
        folders: further config folders (`--config-dir`).
        resolved: all keys as plain values with interpolations resolved, as stored in rows.
    """

    model: Model = field(default_factory=Model)
    logger: Logger = field(default_factory=Logger)
    data: Data = field(default_factory=Data)
    judge: Judge = field(default_factory=Judge)
    gate: Gate = field(default_factory=Gate)
    slurm: Slurm = field(default_factory=Slurm)
    stream: Stream = field(default_factory=Stream)
    methods: Mapping[str, Mapping[str, Any]] = _key({}, "chosen methods and their parameters (filled by method=...)")
    datasets: Mapping[str, Mapping[str, Any]] = _key({}, "chosen datasets and their parameters (filled by dataset=...)")
    variants: Mapping[str, Mapping[str, Any]] = _key(
        {}, "methods under names of their own: variants.g3={base: mmshift, gamma: 3}"
    )
    budget: tuple[int | float | str, ...] = _key(
        (64,), "entries per KV head (64), fraction kept (0.2, 20%) or bytes of all state (64MiB); a value or a list"
    )
    seed: tuple[int, ...] = _key((0,), "seed of stochastic methods; a value or a list", "whole numbers >= 0")
    protocol: tuple[str, ...] = _key(
        (PROTOCOL,), "which tokens are decoded from the compressed cache; a value or a list", PROTOCOLS
    )
    reading: tuple[str, ...] = _key(("paper",), "a paper's text or its released code; a value or a list", READINGS)
    page_size: str = _key("small", "pages of 16x16 (small) or 24x24 (large) cells", ("small", "large"))
    limit: int | None = _key(None, "first N samples of each dataset; null = all", _COUNT_OR_NULL)
    samples: tuple[str, ...] | None = _key(
        None,
        "answer only these samples, whatever the limit; null = all within the limit",
        "ids of samples, a list or one",
    )
    baseline: str = _key("full", "add the full cache to every run, for paired differences", ("full", "none"))
    sharing: str = _key("on", "share one prefill among all cells; off runs every cell by itself", SWITCH)
    decode: str = _key("eager", "run the model's decode step as it is, or compiled as one graph", ("eager", "compiled"))
    scenario: str = _key(
        QUALITY,
        "quality: answers to datasets and their scores; efficiency: times, bytes and memory of every cell",
        SCENARIOS,
    )
    lengths: tuple[int, ...] = _key(
        (2048, 8192, 32768), "efficiency: tokens of the prompts; a value or a list", f"whole numbers >= {SHORTEST}"
    )
    prompts: tuple[str, ...] = _key(
        ("text",),
        "efficiency: content of the prompts: text, or as many visual tokens as fit; a value or a list",
        ("text", "image", "video"),
    )
    profiles: str | None = _key(
        None,
        "efficiency, random weights: rows of real prompts, whose division of the budget prompt-dependent methods copy",
        "a folder of rows",
    )
    batch: tuple[int | str, ...] = _key(
        (1,), "efficiency: sequences at a time; max: as many as fit; a value or a list", "whole numbers >= 1, or max"
    )
    batch_prefill: str = _key(
        ONE_BY_ONE, "efficiency: prefill a batch's sequences one by one and join them, or together", BATCH_PREFILLS
    )
    memory_limit: int | str | None = _key(
        None,
        "efficiency: limit of passes that count memory, weights included; null = the device's memory",
        "bytes, 512MiB, 8GiB, or null",
    )
    new_tokens: int = _key(64, "efficiency: exact number of tokens of every answer", "a whole number >= 3")
    repeats: int = _key(5, "efficiency: timed passes of every cell and length", _POSITIVE_WHOLE_NUMBER)
    order_seed: int = _key(0, "efficiency: seed of the order of passes", "a whole number >= 0")
    stage: str = _key("both", "generate answers, score stored answers, or both", ("both", "generate", "score"))
    shard: str = _key("0/1", "the part of each dataset that this process answers, by cluster", "i/n with 0 <= i < n")
    only: tuple[str, ...] | None = _key(
        None, "datasets of the run that this process answers; a name or a list, null = all", "names"
    )
    shards: int = _key(
        1, "sweep with launcher=slurm: number of jobs per dataset, split by cluster", _POSITIVE_WHOLE_NUMBER
    )
    dry: bool = _key(False, "sweep with launcher=slurm: print the scripts and the plan, submit nothing")
    out: str = _key("runs/default", "folder of the result rows", "a folder name")
    primary: str | None = _key(
        None,
        "primary endpoint of the study in `out`; tables mark the rest as exploratory",
        "'<dataset> <metric> <budget>' and perhaps a protocol",
    )
    retry: tuple[str, ...] = _key(
        (), "failed rows to run again; changed: answers to pictures or videos that were changed", RETRIES
    )
    timeout_s: float | None = _key(
        None, "time limit of one answer, and of each of its measures [s]; null = none", "a number > 0 or null"
    )
    fidelity: str = _key("on", "compare every answer's distributions with those of full, token by token", SWITCH)
    keep: str = _key(
        "counts",
        "what new rows store about kept entries: how many, or also which ones (for reports)",
        ("counts", "indices"),
    )
    fork_batch: int = _key(
        16, "maximum number of answers decoded together; 1 = no shared decoding", _POSITIVE_WHOLE_NUMBER
    )
    fork_memory: int | str | None = _key(
        None, "memory cap of the forks' caches; null = none", "bytes, 512MiB, 2GiB, or null"
    )
    json: bool = _key(False, "end stdout with one JSON document (same as --json)")
    folders: tuple[str, ...] = ()
    resolved: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def selection(self) -> Selection:
        """Return which samples this process answers: the limit, the named samples, and the shard."""
        return Selection(self.limit, self.samples, str(self.shard))

    @property
    def answering(self) -> AnswerConfig:
        """Return the settings by which this process answers samples."""
        return AnswerConfig(
            model=self.model,
            selection=self.selection,
            shares_prefill=self.sharing == "on",
            decode=self.decode,
            timeout_s=self.timeout_s,
            fidelity=self.fidelity == "on",
            keeps_indices=self.keep == "indices",
            fork_batch=self.fork_batch,
            fork_memory=self.fork_memory,
            stream=self.stream.settings,
        )

    @property
    def method_config(self) -> MethodConfig:
        """Return the chosen methods and variants, with their readings and the baseline."""
        return MethodConfig(self.methods, self.variants, self.folders, self.reading, self.baseline)

    @property
    def grid(self) -> GridConfig:
        """Return the datasets, protocols, budgets and seeds whose combinations a method runs at."""
        return GridConfig(tuple(self.datasets), self.protocol, self.budget, self.seed, self.answering)

    @property
    def efficiency(self) -> EfficiencyConfig:
        """Return the settings of the passes of scenario=efficiency."""
        return EfficiencyConfig(self.batch_prefill, self.memory_limit, self.new_tokens, self.repeats, self.order_seed)

    def labelled(self, labels: Iterable[str]) -> RunConfig:
        """Return the configuration with its datasets renamed to `labels`, in order."""
        return self.updated(datasets=dict(zip(labels, self.datasets.values(), strict=True)))

    def updated(self, **values: Any) -> RunConfig:
        """Return a copy of the configuration in which the given keys have other values, in `resolved` too."""
        plain_values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return replace(self, **values, resolved={**self.resolved, **plain_values})


_GROUPS: tuple[type, ...] = (Model, Logger, Data, Judge, Gate, Slurm, Stream)
SCHEMAS: dict[str, type] = {"": RunConfig, **{group.__name__.lower(): group for group in _GROUPS}}


def keys(schema: type = RunConfig) -> dict[str, tuple[str, str | tuple[str, ...]]]:
    """Map each key of a configuration dataclass to (help text, allowed values), in order. Nested dataclasses are left out."""
    return {f.name: (f.metadata["help"], f.metadata["allowed"]) for f in fields(schema) if "help" in f.metadata}


def words() -> dict[str, tuple[str, ...]]:
    """Map each key that takes only certain words to these words."""
    allowed_words = {}
    for group, schema in SCHEMAS.items():
        for name, (_, what) in keys(schema).items():
            if isinstance(what, tuple):
                allowed_words[f"{group}.{name}" if group else name] = what
    return allowed_words


_RANGE_PHRASE = re.compile(r"(?:a )?(?P<whole>whole )?numbers? (?P<sign>>=?) (?P<least>\d+)")


def ranges() -> dict[str, tuple[type, float, bool, bool]]:
    """Map each key that takes only numbers to (type, smallest number, whether that number is allowed, whether null
    is)."""
    range_by_key: dict[str, tuple[type, float, bool, bool]] = {}
    for group, schema in SCHEMAS.items():
        for name, (_, phrase, *_) in keys(schema).items():
            if match := _RANGE_PHRASE.match(str(phrase)):
                number_type, is_inclusive = int if match["whole"] else float, match["sign"] == ">="
                allows_null = "None" in str(schema.__annotations__[name])
                range_by_key[f"{group}.{name}".lstrip(".")] = (
                    number_type,
                    float(match["least"]),
                    is_inclusive,
                    allows_null,
                )
    return range_by_key


def allowed(key: str) -> str:
    """Return the allowed values of a key, such as `model.dtype`, as text for a message."""
    group, _, name = key.rpartition(".")
    allowed_values = keys(SCHEMAS[group])[name][1]
    return allowed_values if isinstance(allowed_values, str) else ", ".join(allowed_values)


def accepts(key: str, value: Any) -> bool:
    """Tell whether a value has the declared type of a key. Unknown keys and unchecked types accept everything."""
    group, _, name = key.rpartition(".")
    scalar_types = scalars(get_type_hints(SCHEMAS[group]).get(name, Any)) if group in SCHEMAS else None
    if scalar_types is None or str in scalar_types:
        return (
            scalar_types is None
            or value is None
            or isinstance(value, (str, int, float))
            or type(value).__name__ == "QuotedString"
        )
    if value is None or isinstance(value, bool):
        return (NoneType if value is None else bool) in scalar_types
    return (isinstance(value, int) and bool({int, float} & {*scalar_types})) or (
        isinstance(value, float) and float in scalar_types
    )


def scalars(declared: Any) -> tuple[type, ...] | None:
    """Return the types of a key declared with this type, such as `(int, NoneType)`; None for any type other than str,
    int, float or bool, with or without None."""
    declared_types = get_args(declared) or (declared,)
    return declared_types if {*declared_types} in _SCALAR_TYPE_SETS else None


_SCALAR_TYPE_SETS = [{kind, *other} for kind in (str, int, float, bool) for other in ((), (NoneType,))]


def resolve_path(path: str) -> str:
    """Return a model path in the loader's form. `pkg://mmkv_bench/tiny/weights` becomes that folder, `~` the home folder, and
    `fetched://name/file` the file that `mmkv-bench fetch model name` wrote below the cache folder.

    Raises:
        ConfigError: the package is not installed.
    """
    if path.startswith(FETCHED_SCHEME):
        from mmkv_bench.file_state import cache_dir

        return str(cache_dir() / "models" / path.removeprefix(FETCHED_SCHEME))
    if path.startswith(PACKAGE_SCHEME):
        from importlib.resources import files

        package, _, path_in_package = path.removeprefix(PACKAGE_SCHEME).partition("/")
        try:
            return str(files(package).joinpath(path_in_package))
        except (ImportError, ValueError, TypeError):
            raise ConfigError(
                f"{path} names package {package!r}, which is not installed; allowed: "
                f"{PACKAGE_SCHEME}<package>/<folder>, a folder, or a hub id (org/name); correct the path"
            ) from None
    return str(Path(path).expanduser()) if path.startswith("~") else path


def as_list(value: Any) -> list[Any]:
    """Return a value or a list of values as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `changes`. Mappings are merged recursively; lists are replaced."""
    result = dict(base)
    for key, value in changes.items():
        base_value = result.get(key)
        result[key] = (
            merged(base_value, value) if isinstance(base_value, Mapping) and isinstance(value, Mapping) else value
        )
    return result
