"""The bridge to lmms-eval: its loop asks, we answer and store; its metric code scores what is stored.

Only `harness.py` imports lmms-eval, and only when a function needs it: importing this package is quick.
"""

from mmkv_bench.evaluation.captions import release
from mmkv_bench.evaluation.content import confirm, files_as_scored, fingerprint, inputs_of, scorer_digest, scorer_files
from mmkv_bench.evaluation.contract import Answer, CellScores, Request, SampleRef, SampleScore
from mmkv_bench.evaluation.documents import forget_changed, generation_settings, prepare, sample_refs
from mmkv_bench.evaluation.environment import go_offline
from mmkv_bench.evaluation.files_read import opened
from mmkv_bench.evaluation.generating import generate, prompt_hashes
from mmkv_bench.evaluation.grader import Grader
from mmkv_bench.evaluation.prompts import rows_hold_media
from mmkv_bench.evaluation.running_scores import RunningScores
from mmkv_bench.evaluation.scoring import score

__all__ = [
    "Answer",
    "CellScores",
    "Grader",
    "Request",
    "RunningScores",
    "SampleRef",
    "SampleScore",
    "confirm",
    "files_as_scored",
    "fingerprint",
    "forget_changed",
    "generate",
    "generation_settings",
    "go_offline",
    "inputs_of",
    "opened",
    "prepare",
    "prompt_hashes",
    "release",
    "rows_hold_media",
    "sample_refs",
    "score",
    "scorer_digest",
    "scorer_files",
]
