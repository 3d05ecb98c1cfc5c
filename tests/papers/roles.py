"""The role of every column of the store where rows stand beside a paper's number."""

from __future__ import annotations

from collections.abc import Mapping

IDENTITY, CONTEXT, FREE = "identity", "context", "free"
"""Identity: held against the address and `conf`, or shared by the numbers that are compared (`identity`). Context: told beside
a number, and may differ. Free: the measurement itself, names, stamps and what follows from other columns."""

_ROW = "schema_version cell"
ROLES: Mapping[str, Mapping[str, str]] = {
    "cells": {
        IDENTITY: "model model_fingerprint dataset dataset_fingerprint base reading protocol budget_kind budget_entries "
        "budget_fraction seed parameters dtype attention generation numerics_version method_version config git_dirty device cpu "
        "weights model_revision",
        CONTEXT: "torch transformers versions git_commit driver weights_file prompt_format created_at",
        FREE: f"{_ROW} method tuned allocation_scope row_digest",
    },
    "responses": {
        IDENTITY: "dataset sample_id prompt_hash status measured",
        CONTEXT: "fallback chosen committed_at entries_asked entries_resident question_text_before_cut",
        FREE: f"{_ROW} doc_id cluster error answer token_ids n_tokens tokens_from_compressed finish_reason prompt_tokens "
        "context_tokens visual_tokens budget_entries entries_planned "
        "entries_reachable entries_appended entries_end kept kept_digest kept_indices bytes_device bytes_host bytes_metadata "
        "bytes_full bytes_held bytes_padding bytes_state bytes_read_step bytes_moved_step window_effective encode_s "
        "vision_s prefill_s compress_s decode_s ttft_s tpot_s peak_device_bytes peak_resident_bytes forced_kl forced_agree "
        "reference_nll reference_samples fork_group fork_batch fork_rows "
        "question_number question_known compression_reused slim worker shard "
        "entries_max entries_peak eviction_rounds entries_evicted frames_left ask_at",
    },
    "samples": {IDENTITY: "dataset sample_id metric status", CONTEXT: "cluster", FREE: f"{_ROW} value parts"},
    "metrics": {
        IDENTITY: "dataset metric judge judge_prompts judge_temperature scorer_digest",
        CONTEXT: "scorer_files",
        FREE: f"{_ROW} n n_ok value value_failures_zero low high interval difference difference_low difference_high lmms_eval "
        "lmms_eval_reason answers_digest row_digest",
    },
    "timings": {
        IDENTITY: "dataset prompt_tokens batch batch_prefill new_tokens status disturbed",
        CONTEXT: "fallback load threads committed_at",
        FREE: f"{_ROW} visual_tokens prompts profile copied searched memory_limit measured repeat phase error seconds steps_s "
        "peak_allocated peak_reserved peak_resident bytes_held bytes_useful_step bytes_read_step place order_seed",
    },
    "diagnostics": {
        IDENTITY: "name model dataset sample_id quantity part settings",
        CONTEXT: "measurement model_fingerprint dtype dataset_fingerprint versions committed_at",
        FREE: "schema_version layer head x value",
    },
    "prompts": {
        IDENTITY: "",
        CONTEXT: "prompt_hash model_fingerprint dataset sample_id question rendered reference media images visual",
        FREE: "schema_version doc_id committed_at",
    },
}
"""Table -> role -> its columns."""


def columns(table: str, role: str) -> list[str]:
    """The columns of a table that have a role."""
    return ROLES[table][role].split()
