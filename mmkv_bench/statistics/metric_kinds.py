"""Properties of metrics, by name: how samples are aggregated, the better direction, and the scale of lmms-eval's aggregate.

A dataset's score is usually the mean of the samples' scores, which are from 0 to 1 wherever the metric allows it. If it is
not a mean (corpus BLEU), each sample has several numbers (column `parts` of `samples`), and the score is a function of
their sums: over the whole dataset for the score, over drawn clusters for its interval.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Pooled:
    """An aggregate that is no mean of scores but a function of k sums over samples, such as corpus BLEU.

    Each sample has k numbers, its parts. Calling the object with the parts, float64 [n, k], returns the aggregate.

    function: sums of the parts, float64 [..., k] -> aggregate [...].
    ratio: the aggregate is exp(first sum / second sum), so aggregates are compared by their logarithms.
    """

    function: Callable[[np.ndarray], np.ndarray]
    ratio: bool = False

    def __call__(self, parts: np.ndarray) -> float:
        return float(self.function(parts.sum(axis=0)))


@dataclass(frozen=True)
class Upstream:
    """How lmms-eval's aggregate of a metric is converted to our scale.

    unit: name of lmms-eval's scale in tables. factor: ours / lmms-eval's.
    summed: lmms-eval sums over samples, so its aggregate is also divided by their number.
    """

    unit: str
    factor: float = 1.0
    summed: bool = False

    def as_ours(self, value: float, n: int) -> float:
        """Return lmms-eval's aggregate of `n` samples on our scale."""
        return value * self.factor / (n if self.summed else 1)


SAME = Upstream("the same")
PERCENT = Upstream("percent", 0.01)
# From the aggregation functions of lmms-eval 0.7.3.
UPSTREAM = {
    "ocrbench_accuracy": Upstream("right answers / 1000", 1000.0, summed=True),
    "tree_edit_distance": Upstream("a sum over samples", summed=True),  # synthdog_en, synthdog_zh
    "gpt_eval_score": PERCENT,  # mmvet
    "WUPS": PERCENT,  # nextqa_oe
}
PERCENT_NAMES = re.compile(r"vstar_\w+_acc|videomme_\w*score")  # one metric per category, or per variant of the task

# Measures of every run, beside the tasks' metrics (evaluation/extra_metrics.py says what each is).
POSITIONS = (32, 64, 128, 256, 512)  # last token of each stretch of a continuation
KL_TO, TOP1_TO = (tuple(f"{name}_to_{end}" for end in POSITIONS) for name in ("fidelity_kl", "fidelity_top1"))
_KL = ("fidelity_kl", "fidelity_kl_all", "fidelity_kl_first", *KL_TO)
FIDELITY = (*_KL[:3], "fidelity_top1", "divergence", "same_answer", *KL_TO, *TOP1_TO)
MEASURES = {*FIDELITY, "ppl", "ppl_without_first", "rouge_l_sampled", "rouge_l_greedy"}
# Nats and tokens: amounts without an upper end. They are no shares, even if every sample happens to be 0 or 1.
AMOUNTS = {*_KL, "divergence"}
# Largest value that a sample counts for, by metric: KL has no end, and one answer of 20 nats would outweigh hundreds.
CAPS = dict.fromkeys(_KL, 5.0)
# Video-ChatGPT's marks from 0 to 5, CIDEr from 0 to 10.
AMOUNT_NAMES = re.compile(r"gpt_eval_score_[a-z_]+|(?:[a-z]+_)?CIDEr")
PARSE_FAILED = "parse_failed"  # 1 if no choice could be parsed from an answer
LOWER_IS_BETTER = {PARSE_FAILED, "autodq_no_events", *_KL, "ppl", "ppl_without_first"}


def upstream(metric: str) -> Upstream:
    """Return the scale on which lmms-eval prints its aggregate of the metric."""
    return UPSTREAM.get(metric, PERCENT if PERCENT_NAMES.fullmatch(metric) else SAME)


def lower_is_better(metric: str) -> bool:
    return metric in LOWER_IS_BETTER


def is_share(metric: str) -> bool:
    """Tell whether a sample's score is a share of 1 (0 is failure and 1 is success), not an amount."""
    return metric not in AMOUNTS and not AMOUNT_NAMES.fullmatch(metric.partition(",")[0])


def aggregate_of(metric: str) -> Pooled | None:
    """Return the function that computes a pooled metric from sums over samples; None for a mean over samples."""
    if metric == "METEOR" or metric.endswith("_METEOR"):
        return METEOR
    if metric in ("ppl", "ppl_without_first"):
        return PERPLEXITY
    if AUTODQ_F1_NAMES.fullmatch(metric):
        return F1_OF_MEANS
    bleu_name = BLEU_NAMES.fullmatch(metric)
    return bleu(int(bleu_name[1])) if bleu_name else None


BLEU_NAMES = re.compile(r"(?:[a-z]+_)?Bleu_([1-4])")  # textcaps_Bleu_4, vatex_Bleu_4, ...
# The constants of pycocoevalcap, so that an order without a match gives almost 0 instead of a division by 0
BLEU_TINY, BLEU_SMALL = 1e-15, 1e-9


def bleu(order: int) -> Pooled:
    """Return corpus BLEU up to n-grams of `order` (Papineni et al. 2002), computed from sums of 2 + 2 x order counts per sample.

    Counts: words of the answer, words of the closest reference, right n-grams for n = 1..order, all n-grams for n = 1..order.
    """

    def of_totals(totals: np.ndarray) -> np.ndarray:
        caption_words, reference_words = totals[..., 0], totals[..., 1]
        matched_ngrams, caption_ngrams = totals[..., 2 : 2 + order], totals[..., 2 + order : 2 + 2 * order]
        precision = np.prod((matched_ngrams + BLEU_TINY) / (caption_ngrams + BLEU_SMALL), axis=-1) ** (1 / order)
        length_ratio = (caption_words + BLEU_TINY) / (reference_words + BLEU_SMALL)
        return precision * np.exp(np.minimum(0.0, 1 - 1 / length_ratio))

    return Pooled(of_totals)


# METEOR 1.5 for English in its default (ranking) task, as pycocoevalcap starts it: Denkowski and Lavie 2014, table 1.
METEOR_ALPHA, METEOR_BETA, METEOR_GAMMA, METEOR_DELTA = 0.85, 0.2, 0.6, 0.75
METEOR_WEIGHTS = np.array([1.0, 0.6, 0.8, 0.6])  # exact, stem, synonym, paraphrase


def _meteor(totals: np.ndarray) -> np.ndarray:
    """Return corpus METEOR (Denkowski and Lavie 2014, section 2) from sums of the METEOR program's 23 counts per sample.

    Counts in order:
    - words of answer and of reference; function words of both;
    - for each of four matchers, the matched content words of answer and reference, then the matched function words of both;
    - chunks (0 if one chunk is the whole answer and reference, which is not fragmented);
    - matched words of answer and of reference.
    """
    text_words, function_words = totals[..., 0:2], totals[..., 2:4]
    # axes: matcher, content or function words, answer or reference
    matched = totals[..., 4:20].reshape(*totals.shape[:-1], 4, 2, 2)
    weighted = np.einsum("...mko,m,k->...o", matched, METEOR_WEIGHTS, np.array([METEOR_DELTA, 1 - METEOR_DELTA]))
    weighted_length = METEOR_DELTA * (text_words - function_words) + (1 - METEOR_DELTA) * function_words
    precision, recall = np.moveaxis(weighted / np.maximum(weighted_length, np.finfo(float).tiny), -1, 0)
    weighted_denominator = METEOR_ALPHA * precision + (1 - METEOR_ALPHA) * recall
    harmonic_mean = precision * recall / np.maximum(weighted_denominator, np.finfo(float).tiny)
    matches = totals[..., 21:23].mean(axis=-1)
    fragmentation = totals[..., 20] / np.maximum(matches, np.finfo(float).tiny)
    return harmonic_mean * (1 - METEOR_GAMMA * fragmentation**METEOR_BETA)


METEOR = Pooled(_meteor)


# Over parts [2]: the summed negative log-likelihoods of a reference's tokens, and the number of these tokens.
PERPLEXITY = Pooled(lambda totals: np.exp(totals[..., 0] / np.maximum(totals[..., 1], 1.0)), ratio=True)


# DREAM-1K's F1 is the F1 of mean precision and mean recall. Over parts [3]: precision, recall and 1.
AUTODQ_F1_NAMES = re.compile(r"autodq_f1(?:_[a-z_]+)?")  # over all categories, and per category


def _f1_of_means(totals: np.ndarray) -> np.ndarray:
    precision, recall = (totals[..., i] / np.maximum(totals[..., 2], 1.0) for i in (0, 1))
    return 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).tiny)


F1_OF_MEANS = Pooled(_f1_of_means)
