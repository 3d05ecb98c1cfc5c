"""Every column of every table, declared once: name, Arrow type, unit, meaning. Tables and plots are functions of these.

`python -m mmkv_bench.store.schema` prints the columns as markdown (docs/rows.md is made from it).
A further column that may be null reads as null in files that are older than it. Any other change of columns, types or
meanings bumps `SCHEMA_VERSION`; a store of another version is refused, never converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

SCHEMA_VERSION = 1

STATUSES = ("ok", "oom", "timeout", "nan", "error")
FAILURES = STATUSES[1:]

FALLBACKS = {
    "prompt_within_budget": "the prompt has no more tokens than the budget; nothing was evicted, the answer is that of full",
    "window_reduced": "fewer queries were observed than asked: min(window, C // 2) or the prompt allows no more; see "
    "window_effective",
    "protected_reduced": "the sinks and recents that the method keeps are more than the budget; the last of them stay",
    "within_residual": "KIVI: fewer entries stay than its residual holds; the prompt's entries are in full precision",
    "statistics_undefined": "expected_attention: too few queries for a covariance; entries were ranked by position",
    "single_modality": "a prompt of text alone or visual tokens alone, where the method divides between the two",
    "no_visual_tokens": "a prompt without visual tokens, where the method ranks text before them or compares the two",
    "no_text_tokens": "hybridkv: a prompt of visual tokens alone; sparsity was measured on all its rows",
    "text_over_budget": "there is more text than a method that puts text first has entries for",
    "chunk_reduced": "hybridkv: the budget of a dynamic head is smaller than one chunk",
    "infeasible_allocation": "hybridkv: r asks for more than the budget; dynamic heads got less",
    "press_reduced": "kvpress: the press gives its highest score to more entries (its window, its sinks) than the budget "
    "holds; the last token and the latest of them stay",
    "context_end": "the answer was stopped where the model's context ends, before max_new_tokens",
    "oracle_no_answer_step": "oracle: the answer has no token that is decoded from the cache, so it knows nothing",
}
"""Names in the column `fallback` that built-in methods give, and what they mean. Parts of a user's may give others."""

SLIM = {
    "encode_s, vision_s, prefill_s, compress_s, decode_s, ttft_s, tpot_s, peak_device_bytes, peak_resident_bytes": "null "
    "where `measured` is group: times of a machine that others used; rows measured on their own keep theirs",
    "kept_digest": "null but for a tenth of each cell's samples, three at least, chosen by a hash of cell and sample",
    "forced_kl, forced_agree, reference_nll": "null; what was made of them stands in `samples` and stays when cells are "
    "added",
    "fork_group": "null",
    "committed_at": "of the cell's newest row",
}
"""What `pack --slim` leaves out of response rows; running the cells again makes it again."""
LEFT_OUT = (
    "Spare slots: a layer reserves slots for the tokens to come (what `max_new_tokens` needs, one where a method evicts as "
    "it decodes). `bytes_*` count what is kept, not what is reserved.",
    "Padding: heads of a layer that keep fewer entries than its longest are padded to it. Those slots are in `bytes_device` "
    "and `bytes_metadata` and not told apart from entries: methods with head-wise budgets (`adakv`, `sparsemm` and what is "
    "built on them) show more bytes than others at equal `entries_resident`.",
    "Batches: forks that decode together are padded to the longest of the batch. Bytes are those of the fork by itself.",
    "Buffers of decode policies: what a method carries beside its entries, such as the attention that `h2o_decode` gathers "
    "for each of them. The scores of the prefill are gone once a cell run by itself (`sharing=off`) decodes.",
    "The entry more: a method that evicts after the newest token has attended (`h2o_decode`, `local`, `prefixkv`, "
    "`elastic_cache`) reads C + 1 entries per head at each step and holds as many for its length.",
    "What comes after compression: the question of `query_agnostic` (`entries_appended`) and the answer (`entries_end`) are "
    "in no `bytes_*`.",
)
"""What no column of bytes or entries shows, in words; the columns for it come with a schema of their own."""

TEXT, INT, FLOAT, BOOL = pa.string(), pa.int64(), pa.float64(), pa.bool_()
TIME = pa.timestamp("us", tz="UTC")
FLOATS, BOOLS = pa.list_(FLOAT), pa.list_(BOOL)
TEXTS, INTS, COUNTS = pa.list_(pa.string()), pa.list_(pa.int32()), pa.list_(pa.list_(pa.int32()))


@dataclass(frozen=True)
class Column:
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


def _must(name: str, type: pa.DataType, doc: str, unit: str = "", **flags) -> Column:
    return Column(name, type, doc, unit, required="always", **flags)


def _when_ok(name: str, type: pa.DataType, doc: str, unit: str = "", **flags) -> Column:
    return Column(name, type, doc, unit, required="ok", **flags)


_VERSION = _must("schema_version", INT, "version of this schema the row was written under", stamped=True)
_CELL = _must("cell", TEXT, "hash of the cell: model, data, prompt, method, budget, protocol, seed, numerics")
_DATASET = _must("dataset", TEXT, "dataset name")
_SAMPLE = _must("sample_id", TEXT, "sample, unique within its dataset")
_CLUSTER = _must("cluster", TEXT, "what samples share (page, image, document, video): the unit of resampling")

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
    _must("status", TEXT, "how generation ended; only ok rows have an answer", allowed=STATUSES),
    Column("error", TEXT, "message of the failure; null exactly when ok"),
    _must("fallback", TEXTS, "reasons why less was done than asked, by the names listed under Fallbacks; may be empty"),
    _when_ok("answer", TEXT, "decoded answer; null unless ok"),
    _when_ok("token_ids", INTS, "generated token ids, with the end token when it was generated", "token ids"),
    _when_ok("n_tokens", INT, "generated tokens", "tokens"),
    _when_ok("tokens_from_compressed", INT, "generated tokens that were decoded from the compressed cache", "tokens"),
    _when_ok("finish_reason", TEXT, "why decoding stopped", allowed=("eos", "stop", "length")),
    _when_ok("prompt_tokens", INT, "tokens of the whole prompt", "tokens"),
    _when_ok("context_tokens", INT, "tokens that were prefilled before compression (T)", "tokens"),
    _when_ok("visual_tokens", INT, "image and video tokens of the prompt", "tokens"),
    Column("question_text_before_cut", INT, "query_agnostic: non-template text tokens before the cut", "tokens"),
    Column("budget_entries", INT, "C, planned entries per KV head (average); null for full", "entries"),
    Column("entries_asked", INT, "C x layers x KV heads; null for full", "entries"),
    Column(
        "entries_planned",
        INT,
        "entries selected to stay, the re-fed token of strict included, summed over layers and KV heads",
        "entries",
    ),
    _when_ok("entries_resident", INT, "entries counted in the stored tensors after compression", "entries"),
    Column(
        "entries_reachable",
        INT,
        "entries a decode step may read, those on the host included; methods that evict after a token has attended read "
        "that token's own on top",
        "entries",
    ),
    Column("entries_appended", INT, "entries of prompt tokens fed after compression (query_agnostic)", "entries"),
    Column(
        "entries_end",
        INT,
        "entries after the last token: counted in the stored tensors (own, and methods that act while decoding), or "
        "resident plus appended plus decoded (group)",
        "entries",
    ),
    _when_ok("kept", COUNTS, "entries after compression, [layer][KV head]", "entries"),
    _when_ok(
        "kept_digest", TEXT, "first 16 hex digits of the sha256 of the kept indices; slim rows: of a seeded tenth"
    ),
    Column(
        "bytes_device", INT, "bytes of K and V kept where the model computes, after compression; see Left out", "bytes"
    ),
    Column("bytes_host", INT, "bytes of K and V on the host after compression, staging buffers included", "bytes"),
    Column("bytes_metadata", INT, "bytes of positions, scales, minima, mean keys of chunks", "bytes"),
    Column("bytes_full", INT, "bytes of the full K and V of the prompt", "bytes"),
    Column("window_effective", INT, "observation window used, where the budget shortened it", "tokens"),
    Column("encode_s", FLOAT, "time of the processor (images and text to tensors)", "seconds"),
    Column("vision_s", FLOAT, "time of the vision tower; contained in prefill_s", "seconds"),
    Column("prefill_s", FLOAT, "time of the prompt's forward pass", "seconds"),
    Column("compress_s", FLOAT, "time of scoring, allocation, selection and reduction", "seconds"),
    Column("decode_s", FLOAT, "time of all decode steps", "seconds"),
    Column("ttft_s", FLOAT, "time to first token; null when not measured", "seconds"),
    Column("tpot_s", FLOAT, "time per output token after the first; null when not measured", "seconds"),
    Column("peak_device_bytes", INT, "peak device memory (CUDA); null on CPU", "bytes"),
    Column("peak_resident_bytes", INT, "peak resident set of the process (CPU); null on CUDA", "bytes"),
    _must(
        "measured",
        TEXT,
        "whose times and peaks these are: the fork group's or the cell's own",
        allowed=("group", "own"),
    ),
    Column(
        "forced_kl",
        FLOATS,
        "fidelity: KL(full || this cell) at each token of full's greedy answer (same protocol), teacher-forced; under paper "
        "the first is 0, being the full prefill's; full's own: a second pass; null: unmeasured",
        "nats",
    ),
    Column("forced_agree", BOOLS, "fidelity: whether both rank the same token first, at each of these tokens"),
    Column(
        "reference_nll",
        FLOATS,
        "-log probability of each token of the dataset's reference answer, teacher-forced; the end token is left out",
        "nats",
    ),
    Column(
        "reference_samples",
        TEXTS,
        "(full) answers sampled at temperature 0.2 with stored seeds: the reference of rouge_l_sampled, and a second one",
    ),
    Column("fork_group", TEXT, "forks with the same value shared one prefill"),
    Column("fork_batch", INT, "rows per decode batch that were asked for", "rows"),
    Column("fork_rows", INT, "rows of the batch this fork decoded in", "rows"),
    Column(
        "slim", BOOL, "packed for publishing, without what is listed under Slim rows; null in rows as they were made"
    ),
    _must("worker", TEXT, "writer that committed the row", stamped=True),
    Column("shard", TEXT, "i/n when the dataset was split"),
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
    Column("reading", TEXT, "paper or released code; null for full", allowed=("paper", "released"), identity=True),
    _must("protocol", TEXT, "where the first token comes from (README, Protocols)", identity=True),
    _must(
        "budget_kind",
        TEXT,
        "unit of the budget; none for full",
        allowed=("entries", "fraction", "none"),
        identity=True,
    ),
    Column("budget_entries", INT, "budget as entries per KV head; null unless asked so", "entries", identity=True),
    Column("budget_fraction", TEXT, "budget as exact decimal fraction kept; null unless asked so", identity=True),
    Column("seed", INT, "seed; null for deterministic methods", identity=True),
    _must("parameters", TEXT, "method parameters", json=True, identity=True),
    _must("tuned", BOOL, "whether a parameter differs from the method's documented default"),
    Column("allocation_scope", TEXT, "when the allocator decides; null for full", allowed=("layer", "model")),
    _must("dtype", TEXT, "floating point type of weights and cache", identity=True),
    _must("attention", TEXT, "attention implementation", identity=True),
    _must("generation", TEXT, "generation settings", json=True, identity=True),
    _must("numerics_version", INT, "bumped by hand when our numbers change", identity=True),
    Column(
        "method_version",
        INT,
        "version of the method's own numbers under this reading and these parameters; null = 1, the first",
        identity=True,
    ),
    _must("torch", TEXT, "torch version", identity=True),
    _must("transformers", TEXT, "transformers version", identity=True),
    _must("config", TEXT, "resolved configuration, secrets redacted", json=True),
    Column("git_commit", TEXT, "commit of the package's checkout; null when installed without one"),
    Column("git_dirty", BOOL, "whether that checkout's code differed from the commit; null without one"),
    _must("versions", TEXT, "versions of python and of the packages that touch numbers", json=True),
    _must("device", TEXT, "accelerator name, or cpu"),
    Column("driver", TEXT, "accelerator driver version; null on cpu"),
    Column("cpu", TEXT, "processor model"),
    Column("weights", TEXT, "where the weights came from; null in older rows", allowed=("hub", "folder", "random")),
    Column("model_revision", TEXT, "revision on the hub; null for local folders"),
    _must("created_at", TIME, "when the cell was first planned", stamped=True),
)

SAMPLE_COLUMNS = (
    _VERSION,
    _CELL,
    _DATASET,
    _SAMPLE,
    _CLUSTER,
    _must("metric", TEXT, "metric name"),
    Column("value", FLOAT, "the sample's value; null unless ok, and where no judge answered", "metric's own"),
    _must("status", TEXT, "status of the response that was scored", allowed=STATUSES),
    Column(
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
    Column("value", FLOAT, "headline; null unless every sample is ok and judged", "metric's own"),
    Column(
        "value_failures_zero",
        FLOAT,
        "the same with failures counted as 0; null where a sample is not judged, or failed and less is better",
        "metric's own",
    ),
    Column("low", FLOAT, "lower end of the interval", "metric's own"),
    Column("high", FLOAT, "upper end of the interval", "metric's own"),
    _must("interval", TEXT, "how the interval was made", allowed=("wilson", "bootstrap", "none")),
    Column("difference", FLOAT, "paired difference to full of the same protocol", "metric's own"),
    Column("difference_low", FLOAT, "lower end of its 95 % interval (docs/statistics.md)", "metric's own"),
    Column("difference_high", FLOAT, "upper end of its interval", "metric's own"),
    Column("lmms_eval", FLOAT, "lmms-eval's own aggregate of the same answers", "metric's own"),
    Column("lmms_eval_reason", TEXT, "why that is missing; begins with `not judged` where a judge gave no answer"),
    Column("judge", TEXT, "id of the judge model, where one answered"),
    Column(
        "judge_prompts",
        TEXT,
        "hash of the judge's prompts: of its questions about the first two samples, with one text for every answer",
    ),
    Column("judge_temperature", FLOAT, "temperature the judge answered at; null where several"),
)

COLUMNS: dict[str, tuple[Column, ...]] = {
    "responses": RESPONSE_COLUMNS,
    "cells": CELL_COLUMNS,
    "samples": SAMPLE_COLUMNS,
    "metrics": METRIC_COLUMNS,
}
ABOUT = {
    "responses": "One row per cell and sample: the answer, how it ended, what was kept, what it cost.",
    "cells": "One row per cell: what was asked, and under which code, versions and device it first ran.",
    "samples": "One row per cell, sample and metric.",
    "metrics": "One row per cell and metric.",
}
SCHEMAS: dict[str, pa.Schema] = {
    table: pa.schema([column.field for column in columns]) for table, columns in COLUMNS.items()
}
RESPONSES, CELLS, SAMPLES, METRICS = (SCHEMAS[table] for table in ("responses", "cells", "samples", "metrics"))


def markdown() -> str:
    """All columns as markdown tables, one section per table."""
    lines = [
        f"Row schema, version {SCHEMA_VERSION}. Every table is a folder of parquet files of the result store. Where a cell's "
        "scores stand in several, `together-…` (many cells scored at once; the newest first) counts before `<cell>`, and "
        "that before `packed-…`; answers are told apart by `committed_at`."
    ]
    words = {"always": "no", "ok": "only when not ok", "no": "yes"}
    for table, columns in COLUMNS.items():
        lines += [
            "",
            f"## {table}",
            "",
            ABOUT[table],
            "",
            "| column | type | unit | null | meaning |",
            "|---|---|---|---|---|",
        ]
        for column in columns:
            allowed = f" (one of: {', '.join(column.allowed)})" if column.allowed else ""
            kind = "JSON string" if column.json else str(column.type).replace("item: ", "")
            lines.append(
                f"| `{column.name}` | {kind} | {column.unit} | {words[column.required]} | "
                f"{column.doc.replace('|', chr(92) + '|')}{allowed} |"
            )
    lines += ["", "## Left out", "", "What the columns of bytes and entries do not show:", ""]
    lines += [f"- {what}" for what in LEFT_OUT]
    lines += [
        "",
        "## Slim rows",
        "",
        "Rows in git are slim (`python -m mmkv_bench.store.pack <rows> --slim`): no table reads what they leave out, and "
        "running the cells again makes it again (`make results RESULTS=runs/full PACK=`).",
        "",
        "| column | in a slim row |",
        "|---|---|",
        *(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {doc} |" for names, doc in SLIM.items()),
        "",
        "## Fallbacks",
        "",
        "What built-in methods write into `fallback`; a user's own parts may give other names.",
    ]
    lines += ["", "| name | meaning |", "|---|---|", *(f"| `{name}` | {doc} |" for name, doc in FALLBACKS.items())]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
