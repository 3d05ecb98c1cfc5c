"""Columns of all tables, each declared once: name, Arrow type, unit, meaning. Tables and plots are functions of these.

`python -m tools.rows_page` writes them to docs/rows.md.
A further column that may be null reads as null in files that are older than it. Any other change of columns, types or
meanings bumps `SCHEMA_VERSION`; a store of another version is refused, never converted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import pyarrow as pa

from mmkv_bench.store.response import STATUSES, Response

SCHEMA_VERSION = 1

NUMERICS_VERSION = 1
"""Bumped by hand whenever a change of this code changes answers of all methods: older rows are then never reused. A
change of one method's numbers raises the version of its part instead (`Scorer.method_version`)."""

FAILURES = STATUSES[1:]

IDENTITY = ("model", "dataset", "method", "base", "reading", "protocol", "budget_kind", "seed", "dtype", "attention")
"""Columns of `cells` by which a stored cell is recognised, whatever its budget and versions."""

RESAMPLING = {"pixels": "shows smaller pictures or fewer frames", "cut_prompt": "leaves out the middle of the text"}
"""`base` of the controls that answer from the full cache of a smaller prompt -> what they do."""

FALLBACKS = {
    "prompt_within_budget": "the prompt fits into the budget: nothing was evicted, and the answer is that of full",
    "window_reduced": "the observation window is shorter than configured: min(window, C // 2), or the prompt, allows no more; "
    "see window_effective",
    "protected_reduced": "the method's sinks and recent tokens exceed the budget; the last of them are kept",
    "within_residual": "KIVI: fewer entries are kept than its residual holds, so the prompt's entries are in full precision",
    "statistics_undefined": "expected_attention: too few queries for a covariance; entries were ranked by position",
    "single_modality": "the method divides the budget between text and visual tokens, and the prompt has only one of them",
    "no_visual_tokens": "the method ranks or compares text and visual tokens, and the prompt has no visual ones",
    "no_frames": "infinipot_v: nothing tells which frame a token belongs to, as outside of protocol=stream; entries were ranked "
    "by their value norm",
    "no_instruction": "kvzip: the prompt was made from tokens, so that the context was fed again without an instruction",
    "nothing_merged": "look_m, meda: the prompt has no visual tokens; evicted entries are dropped, where the releases keep "
    "such prompts whole",
    "no_text_tokens": "hybridkv: a prompt of visual tokens alone; sparsity was measured on all its rows",
    "text_over_budget": "a method that keeps text first has fewer entries than there is text",
    "chunk_reduced": "hybridkv: the budget of a dynamic head is smaller than one chunk",
    "infeasible_allocation": "hybridkv: r needs more than the budget; dynamic heads got less",
    "budget_unused": "hybridkv: less than the budget is kept: no static head can take the entries that rounding the dynamic "
    "heads' share leaves",
    "press_reduced": "kvpress: the press gives its highest score to more entries (its window, its sinks) than the budget "
    "holds; the last token and the latest of them stay",
    "context_end": "the answer ended at the model's context length, before max_new_tokens",
    "control_token_in_text": "a message's own text spells a control token of the model's (`<|im_end|>`), which its tokenizer "
    "reads as that token, as stock transformers does",
    "row_by_row": "scenario=efficiency: the sequences of a batch have their own decode-policy states, so each step attends to "
    "them one by one",
    "eager_decode": "decode=compiled: the method's decode policy holds a different number of entries in each step, so the "
    "answer was decoded eagerly",
    "cut_prompt_over_budget": "cut_prompt: the shortest prompt, its template and a few tokens, has more entries than the budget",
    "pixels_over_budget": "pixels: the prompt with the smallest pictures, or the fewest frames, has more entries than the "
    "budget",
    "oracle_no_answer_step": "oracle: no token of the answer is decoded from the cache, so there is nothing to look ahead to",
}
"""Names in the column `fallback` that built-in methods give, and what they mean. Parts of a user's may give others."""

SLIM = {
    "encode_s, vision_s, prefill_s, compress_s, decode_s, ttft_s, tpot_s, peak_device_bytes, peak_resident_bytes": "null "
    "where `measured` is group: times of a machine that others used; rows measured on their own keep theirs",
    "kept_digest": "null, except for a tenth of each cell's samples (at least three), chosen by a hash of cell and sample",
    "forced_kl, forced_agree, reference_nll": "null; the measures made of them are in `samples` and stay when cells are added",
    "fork_group": "null",
    "committed_at": "that of the cell's newest row",
}
"""Values that `pack --slim` removes from response rows; running the cells again makes them again."""
TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
FLOATS, BOOLS = pa.list_(FLOAT), pa.list_(BOOL)
TEXTS, INTS, COUNTS = pa.list_(pa.string()), pa.list_(pa.int32()), pa.list_(pa.list_(pa.int32()))


@dataclass(frozen=True)
class SchemaColumn:
    """One column. `required`: "always", only in rows with status "ok", or "no" (null allowed)."""

    name: str
    type: pa.DataType
    doc: str
    unit: str = ""
    required: Literal["always", "ok", "no"] = "no"
    allowed: tuple[str, ...] = ()  # the values of an enumeration; empty = any
    json: bool = False  # a string that must parse as JSON
    stamped: bool = False  # written by the store; callers leave it out
    identity: bool = False  # (cells) covered by the cell's hash: may not differ between two rows of one cell

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=self.required != "always")


def _must(name: str, type: pa.DataType, doc: str, unit: str = "", **flags: Any) -> SchemaColumn:
    return SchemaColumn(name, type, doc, unit, required="always", **flags)


_may = SchemaColumn


def _when_ok(name: str, type: pa.DataType, doc: str, unit: str = "", **flags: Any) -> SchemaColumn:
    return SchemaColumn(name, type, doc, unit, required="ok", **flags)


_VERSION = _must("schema_version", INT, "version of this schema the row was written under", stamped=True)
_CELL = _must("cell", TEXT, "hash of the cell: model, data, prompt, method, budget, protocol, seed, numerics")
_DATASET = _must("dataset", TEXT, "dataset name")
_SAMPLE = _must("sample_id", TEXT, "sample, unique within its dataset")
_CLUSTER = _must("cluster", TEXT, "what samples share (page, image, document, video): the unit of resampling")

_TYPES: dict[Any, pa.DataType] = {
    str: TEXT,
    int: INT,
    bool: BOOL,
    float: FLOAT,
    list[str]: TEXTS,
    list[int]: INTS,
    list[float]: FLOATS,
    list[bool]: BOOLS,
    list[list[int]]: COUNTS,
}


def _generated() -> list[SchemaColumn]:
    """The columns that generation fills, in the order of `Response`'s fields, without the cell's name."""
    hints, made = get_type_hints(Response), []
    for one in fields(Response)[1:]:
        flags = {key: value for key, value in one.metadata.items() if key != "counted"}
        kinds = set(get_args(hints[one.name]))
        kind = next(iter(kinds - {NoneType})) if NoneType in kinds else hints[one.name]
        made.append(SchemaColumn(one.name, _TYPES[kind], **flags))
    return made


RESPONSE_COLUMNS = (
    _VERSION,
    _CELL,
    _DATASET,
    _SAMPLE,
    _must("doc_id", INT, "index of the sample in its dataset, as lmms-eval counts"),
    _CLUSTER,
    _when_ok(
        "prompt_hash", TEXT, "hash of the prompt that was answered: its text, pixels of images, contents of video files"
    ),
    *_generated(),
    _may("slim", BOOL, "packed for publishing, without what is listed under Slim rows; null in rows as they were made"),
    _must("worker", TEXT, "writer that committed the row", stamped=True),
    _may("shard", TEXT, "i/n when the dataset was split"),
    _may("chosen", BOOL, "selected by its id (`samples=[...]`), not as one of the first N; null otherwise"),
    _must("committed_at", TIME, "commit time; later than every row the writer had seen", stamped=True),
)

CELL_COLUMNS = (
    _VERSION,
    _CELL,
    _must("model", TEXT, "model name or folder name"),
    _must("model_fingerprint", TEXT, "checksum of configuration and weights", identity=True),
    _must("dataset", TEXT, "dataset name", identity=True),
    _must(
        "dataset_fingerprint",
        TEXT,
        "checksum of the dataset's rows; media that they name by path are in prompt_hash",
        identity=True,
    ),
    _must("method", TEXT, "display name (a method may appear as several variants)"),
    _must("base", TEXT, "method family", identity=True),
    _may("reading", TEXT, "paper or released code; null for full", allowed=("paper", "released"), identity=True),
    _must("protocol", TEXT, "source of the first token (docs/protocols.md)", identity=True),
    _must(
        "budget_kind", TEXT, "unit of the budget; none for full", allowed=("entries", "fraction", "none"), identity=True
    ),
    _may("budget_entries", INT, "budget in entries per KV head; null for other kinds", "entries", identity=True),
    _may("budget_fraction", TEXT, "budget as an exact decimal fraction; null for other kinds", identity=True),
    _may("seed", INT, "seed; null for deterministic methods", identity=True),
    _must("parameters", TEXT, "method parameters", json=True, identity=True),
    _must("tuned", BOOL, "whether a parameter differs from the method's documented default"),
    _may("allocation_scope", TEXT, "when the allocator decides; null for full", allowed=("layer", "model")),
    _must("dtype", TEXT, "floating point type of weights and cache", identity=True),
    _must("attention", TEXT, "attention implementation", identity=True),
    _must("generation", TEXT, "generation settings", json=True, identity=True),
    _must("numerics_version", INT, "raised by hand when the numbers of all methods change", identity=True),
    _may(
        "method_version",
        INT,
        "version of the method's own numbers under this reading and these parameters; null = 1, the first",
        identity=True,
    ),
    _must("torch", TEXT, "torch version", identity=True),
    _must("transformers", TEXT, "transformers version", identity=True),
    _must("config", TEXT, "resolved configuration, secrets redacted", json=True),
    _may("git_commit", TEXT, "commit of the package's checkout; null when installed without one"),
    _may("git_dirty", BOOL, "whether that checkout's code differed from the commit; null without one"),
    _must("versions", TEXT, "versions of python and of the packages that touch numbers", json=True),
    _must("device", TEXT, "accelerator name, or cpu"),
    _may("driver", TEXT, "accelerator driver version; null on cpu"),
    _may("cpu", TEXT, "processor model"),
    _may("weights", TEXT, "where the weights came from; null in older rows", allowed=("hub", "folder", "random")),
    _may(
        "weights_file",
        TEXT,
        "GGUF file of the weights and the types of its tensors; null of other weights and in older rows",
    ),
    _may("model_revision", TEXT, "revision on the hub; null for local folders"),
    _may(
        "prompt_format",
        TEXT,
        "what the model's chat template made of one user message `mmkvprobe`: its system prompt, markers, a fixed date; null in "
        "older rows",
    ),
    _must("created_at", TIME, "when the cell was first planned", stamped=True),
    _may(
        "row_digest", TEXT, "digest of the row's other columns but the stamped ones; null in older rows", stamped=True
    ),
)

SAMPLE_COLUMNS = (
    _VERSION,
    _CELL,
    _DATASET,
    _SAMPLE,
    _CLUSTER,
    _must("metric", TEXT, "metric name"),
    _may("value", FLOAT, "the sample's value; null unless ok, and where no judge answered", "metric's own"),
    _must("status", TEXT, "status of the response that was scored", allowed=STATUSES),
    _may(
        "parts",
        FLOATS,
        "what a metric that is no mean over samples is aggregated from (BLEU: words, reference words, right n-grams, "
        "n-grams); of an empty answer where the sample is not ok",
        "metric's own",
    ),
)

METRIC_COLUMNS = (
    _VERSION,
    _CELL,
    _DATASET,
    _must("metric", TEXT, "metric name"),
    _must("n", INT, "samples", "samples"),
    _must("n_ok", INT, "samples with status ok and a value", "samples"),
    _may("value", FLOAT, "headline; null unless every sample is ok and judged", "metric's own"),
    _may(
        "value_failures_zero",
        FLOAT,
        "the same with failures counted as 0; null where a sample is not judged, or failed and less is better",
        "metric's own",
    ),
    _may("low", FLOAT, "lower end of the interval", "metric's own"),
    _may("high", FLOAT, "upper end of the interval", "metric's own"),
    _must("interval", TEXT, "method of the interval", allowed=("wilson", "bootstrap", "none")),
    _may("difference", FLOAT, "paired difference to full of the same protocol", "metric's own"),
    _may("difference_low", FLOAT, "lower end of its 95 % interval (docs/statistics.md)", "metric's own"),
    _may("difference_high", FLOAT, "upper end of its interval", "metric's own"),
    _may("lmms_eval", FLOAT, "lmms-eval's own aggregate of the same answers", "metric's own"),
    _may("lmms_eval_reason", TEXT, "why `lmms_eval` is missing; begins with `not judged` where a judge gave no answer"),
    _may("judge", TEXT, "id of the judge model, where one answered"),
    _may(
        "judge_prompts",
        TEXT,
        "hash of the judge's prompts: its questions about the first two samples, with one text in place of every answer",
    ),
    _may("judge_temperature", FLOAT, "temperature the judge answered at; null where several"),
    _may(
        "answers_digest", TEXT, "digest of the answers that were scored (sample, status and text); null in older rows"
    ),
    _may("scorer_digest", TEXT, "digest of the task's scoring code and lmms-eval's version; null in older rows"),
    _may(
        "scorer_files",
        TEXT,
        "files that a user's task opened while it scored: path from its YAML, and digest; null for none",
        json=True,
    ),
    _may("row_digest", TEXT, "digest of the row's other columns but the stamped ones; null in older rows"),
)

PHASES = {
    "encode": "the tokenizer's (and processor's) work on the prompt; on the host, in none of the sums",
    "vision": "the vision tower",
    "prefill": "the text model over the prompt, without what follows",
    "score": "scores of the prompt's entries, all layers",
    "select": "which entries stay, all layers",
    "reduce": "storing these alone, all layers",
    "first_token": "from the text model's end to the first token on the host; with `strict` the last token is fed in it",
    "join": "a batch whose sequences were prefilled one by one: their caches are copied into one, layer by layer; with "
    "decode=compiled any cache into storages of fixed capacity",
    "ttft": "from the prompts' tensors to the first token of the batch's last sequence; the prefill of every sequence before "
    "is in it, and with `strict` the join",
    "second_token": "from there to the second token of every sequence, the first that a compressed cache has helped to "
    "choose; the join is in it",
    "total": "from there to the last token",
    "decode": "from the first token to the last, without the join; `steps_s` has each step",
}
"""Values of `timings.phase`."""

TIMING_COLUMNS = (
    _VERSION,
    _CELL,
    _DATASET,
    _must("prompt_tokens", INT, "tokens of the prompt", "tokens"),
    _must("visual_tokens", INT, "of these, visual ones", "tokens"),
    _may(
        "prompts",
        TEXT,
        "content of the prompt beside its template; null in older rows, whose prompts are text",
        allowed=("text", "image", "video"),
    ),
    _may(
        "profile",
        TEXT,
        "digest of the stored row whose division of the budget among layers and heads was imposed, named in the cell's config; "
        "null: the method's own",
    ),
    _must("batch", INT, "sequences at a time"),
    _may(
        "batch_prefill",
        TEXT,
        "how the batch was prefilled: one by one, compressed and joined, or together in one pass; null for a batch of one",
        allowed=("one_by_one", "together"),
    ),
    _may("copied", BOOL, "(searched) only a few prompts were prefilled, the others are copies; null otherwise"),
    _may("searched", BOOL, "a number of sequences that batch=max alone asked for; null in timed passes"),
    _may("memory_limit", INT, "memory limit of the pass; null for the device's own limit", "bytes"),
    _must("new_tokens", INT, "tokens of the answer, the first included", "tokens"),
    _may("repeat", INT, "number of the timed pass; null in the pass that counts memory, whose times are not kept"),
    _must("phase", TEXT, "see Phases", allowed=tuple(PHASES)),
    _must("status", TEXT, "status of the pass; a failed pass has one row, of phase total", allowed=STATUSES),
    _may("error", TEXT, "message of the failure; null when ok"),
    _may("seconds", FLOAT, "time of the phase; null in the pass that counts memory", "seconds"),
    _may("steps_s", FLOATS, "(decode) time of each step, one new token of every sequence", "seconds"),
    _may("peak_allocated", INT, "most bytes of live storages within the phase, weights included", "bytes"),
    _may("peak_reserved", INT, "most bytes that the device's allocator held; null on CPU", "bytes"),
    _may("peak_resident", INT, "(total) largest resident set at a phase's end; null on an accelerator", "bytes"),
    _may(
        "bytes_held",
        INT,
        "(decode) all tensors of the cache before the first step, slack and buffers included",
        "bytes",
    ),
    _may(
        "bytes_useful_step",
        INT,
        "(decode) keys and values that the first step reads, its own included, no padding",
        "bytes",
    ),
    _may("bytes_read_step", INT, "(decode) the same as it lies in memory, padding included", "bytes"),
    _may("fallback", TEXTS, "(total) reasons why less was done than configured, see Fallbacks"),
    _may("disturbed", TEXTS, "(total) disturbances: other processes on the device, a throttled clock, too few threads"),
    _may(
        "load", FLOAT, "(total) the host's load average of the last minute at the end of the pass; null where unknown"
    ),
    _may("threads", INT, "(total) threads of the host that torch's operations had"),
    _must("place", INT, "number of the pass in the order of its run, from 0"),
    _must("order_seed", INT, "seed of that order"),
    _must("measured", TEXT, "always own: nothing else ran in the process", allowed=("own",)),
    _must("committed_at", TIME, "commit time", stamped=True),
)

DIAGNOSTIC_COLUMNS = (
    _VERSION,
    _must(
        "measurement",
        TEXT,
        "hash of name, settings, model, data and versions: all that its numbers depend on but the sample",
    ),
    _must("name", TEXT, "the analysis, as `mmkv-bench diagnose` names it"),
    _must("model", TEXT, "model name or folder name"),
    _must("model_fingerprint", TEXT, "checksum of configuration and weights"),
    _must("dtype", TEXT, "floating point type of weights and cache"),
    _DATASET,
    _must("dataset_fingerprint", TEXT, "checksum of the dataset's rows"),
    _SAMPLE,
    _may("layer", INT, "decoder layer, from 0; null of the whole model"),
    _may("head", INT, "KV head, from 0; null of all heads together"),
    _must("quantity", TEXT, "name of the number within the analysis"),
    _must(
        "part",
        TEXT,
        "the part measured: tokens (prompt, text, visual, answer), tensors (keys, values) or a method at a budget (snapkv@64); "
        "empty for all",
    ),
    _may("x", FLOAT, "x value, where the number is a point of a curve; null otherwise"),
    _must("value", FLOAT, "the number", "quantity's own"),
    _must("settings", TEXT, "weights, prompts, tokens of the answer, the method that part names", json=True),
    _must("versions", TEXT, "versions of the packages that touch numbers", json=True),
    _must("committed_at", TIME, "commit time", stamped=True),
)

PROMPT_COLUMNS = (
    _VERSION,
    _must("prompt_hash", TEXT, "hash of the prompt, as in responses"),
    _must("model_fingerprint", TEXT, "checksum of the model: `visual` holds for this model"),
    _DATASET,
    _SAMPLE,
    _must("doc_id", INT, "index of the sample in its dataset"),
    _must(
        "question",
        TEXT,
        "text of its messages, `<image>` and `<video>` where media stand, turns told apart by their roles",
    ),
    _may("rendered", TEXT, "the whole prompt, as the model's chat template made it; null in older rows"),
    _may("reference", TEXT, "the dataset's reference answer; null where there is none"),
    _must("media", INT, "images and videos in it"),
    _may("images", TEXTS, "files that its images and videos were read from; null where the dataset itself holds them"),
    _may(
        "visual",
        FLOATS,
        "keep=indices: of each visual token its place in the prompt, the number of its image, and top, bottom, left and right as "
        "parts of that image (-1: it shows no place), one behind the other; null where that is not known",
    ),
    _must("committed_at", TIME, "commit time", stamped=True),
)

COLUMNS: dict[str, tuple[SchemaColumn, ...]] = {
    "responses": RESPONSE_COLUMNS,
    "cells": CELL_COLUMNS,
    "samples": SAMPLE_COLUMNS,
    "metrics": METRIC_COLUMNS,
    "timings": TIMING_COLUMNS,
    "diagnostics": DIAGNOSTIC_COLUMNS,
    "prompts": PROMPT_COLUMNS,
}
SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([column.field for column in columns]) for table, columns in COLUMNS.items()
}
RESPONSES, CELLS, SAMPLES, METRICS = (SCHEMAS[table] for table in ("responses", "cells", "samples", "metrics"))
