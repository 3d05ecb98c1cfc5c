"""Measures of compressed caches besides the answers. Answers, counts, times and memory peaks do not depend on them.

- Fidelity: the full cache's greedy answer is fed to every cache (teacher forcing). KL(full || compressed) in nats and top-1
  agreement are computed at each token. Under `paper` the first token comes from the full prefill, so its KL is 0.
- Noise floor: cells that keep all entries are compared with a copy of the full cache. In half precision, the copy is fed token
  by token.
- Likelihood of the dataset's reference answer, for PPL. If the dataset measures `continuation`, fidelity is computed at the
  tokens of the reference answer, in the same pass.

A failed measure stays null and is logged. `timeout_s` applies to each measure of a batch separately.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv_bench.compression.cache import CompressedCache
from mmkv_bench.generation.decode import SEEDS, Decoded, Sampler, decode, greedy
from mmkv_bench.generation.forks import Fork, borrow, copied
from mmkv_bench.generation.prefill import PrefillGroup
from mmkv_bench.generation.result import ForkResult, GenerationTimeout, describe

BLOCK_BYTES = 1 << 28  # of float32 logits in one forward pass
BLOCK_LOGITS = 1 << 22  # compared at a time: 32 MiB as float64; `divergence` needs at most six such blocks at once


@torch.no_grad()
def forced(
    group: PrefillGroup,
    cache: CompressedCache,
    rows: int,
    protocol: str,
    tokens: Sequence[int],
    *,
    stepwise: bool = False,
    block: int | None = None,
    deadline: float | None = None,
) -> Iterator[Tensor]:
    """Feed `tokens` to every row of `cache` (teacher forcing) and yield the logits that predict these tokens, block by block.

    Args:
        group: the shared prefill.
        cache: reduced entries in `rows` rows; entries of the fed tokens are appended.
        stepwise: feed one token per forward pass. Necessary with a decode policy, because each token changes the cache.
        block: tokens per forward pass; None: as many as `BLOCK_BYTES` allows, or 1 if `stepwise`.
        deadline: `time.monotonic()` after which no further pass begins.

    Yields:
        Logits `[R, b, V]` in the model's dtype; all blocks together have one vector of logits per token and row.

    Raises:
        GenerationTimeout: past the deadline.
    """
    prefilled, (lead, offset) = group.prefilled, group.lead(protocol)
    answer = torch.tensor([list(tokens)], device=lead.device)
    fed = torch.cat([lead, answer[:, :-1]], 1)
    if not lead.shape[1]:
        yield prefilled.logits.expand(rows, 1, -1)
    if block is None:
        block = 1 if stepwise else max(1, BLOCK_BYTES // (4 * rows * prefilled.logits.shape[-1]))
    start, lead_rows = 0, max(lead.shape[1] - 1, 0)  # a question's logits are not needed, except its last token's
    while start < fed.shape[1]:
        if deadline is not None and time.monotonic() > deadline:
            raise GenerationTimeout("measuring ran past timeout_s")
        stop = min(max(start, lead_rows) + block, fed.shape[1])
        output = group.model(
            input_ids=fed[:, start:stop].expand(rows, -1),
            position_ids=prefilled.positions(offset + start, stop - start, rows),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=stop - max(start, lead_rows),
            return_dict=True,
        )
        yield output.logits
        start = stop


@contextmanager
def returned(cache: CompressedCache) -> Iterator[CompressedCache]:
    """Lend a cache without decode policy; after the `with` block, drop the entries of the tokens fed in the block."""
    seen_before, states = [layer.seen for layer in cache.compressed], cache.copy_states()
    try:
        yield cache
    finally:
        for layer, seen in zip(cache.compressed, seen_before, strict=True):
            layer.forget(layer.seen - seen)
        cache.put_states(states)


def divergence(full: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compare the rows' next-token distributions with the full cache's, in float64.

    Args:
        full, logits: `[b, V]` and `[R, b, V]`, as the model returned them, before any processor of the generation settings.

    Returns:
        KL(full || row) in nats, float64 `[R, b]`, and whether both rank the same token first, bool `[R, b]`.
    """
    kl = torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for tokens in _stretches(logits.shape[1], logits.shape[2]):
        log_p = full[tokens].double().log_softmax(-1)
        p = log_p.exp()
        for rows in _stretches(len(logits), log_p.numel()):
            log_q = logits[rows, tokens].double().log_softmax(-1)
            kl[rows, tokens] = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
            del log_q
    return kl.clamp_min(0.0), logits.argmax(-1) == full.argmax(-1)  # below 0 by rounding only


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return -log probability of each token, float64 `[R, b]`, from logits `[R, b, V]` and tokens int64 `[b]`."""
    nll = torch.empty(logits.shape[:-1], dtype=torch.float64, device=logits.device)
    for stretch in _stretches(logits.shape[1], logits.shape[2]):
        target_tokens = tokens[stretch].to(logits.device)[None, :, None]
        for rows in _stretches(len(logits), len(target_tokens[0]) * logits.shape[2]):
            log_q = logits[rows, stretch].double().log_softmax(-1)
            nll[rows, stretch] = -log_q.gather(-1, target_tokens.expand(len(log_q), -1, -1)).squeeze(-1)
            del log_q
    return nll


def _stretches(count: int, size: int) -> list[slice]:
    """Divide `count` items of `size` logits each into slices of at most `BLOCK_LOGITS` logits, or of one item."""
    step = max(1, BLOCK_LOGITS // max(1, size))
    return [slice(start, start + step) for start in range(0, count, step)]


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExtraMeasures:
    """The measures that a run requests for one sample besides the answers.

    Attributes:
        fidelity: whether to compare every fork with `full`.
        reference: token ids of the dataset's reference answer, whose likelihood is measured; empty: no such measure.
        samples: whether to sample two answers of `full` at temperature 0.2.
        continuation: whether fidelity is computed at the tokens of the reference in place of full's answer.
    """

    fidelity: bool = False
    reference: tuple[int, ...] = ()
    samples: bool = False
    continuation: bool = False


NOTHING = ExtraMeasures()


class ForkMeasures:
    """Measures all cells that share one prefill, and writes the values into the results."""

    def __init__(self, group: PrefillGroup, extras: ExtraMeasures):
        self.group, self.prefilled, self.extras = group, group.prefilled, extras
        self.deadline: float | None = None  # of what is being measured
        # protocol -> the tokens that are fed and what full predicted: [n, V] in the model's dtype, in host memory
        self.answers: dict[str, tuple[Sequence[int], Tensor]] = {}

    def full(self, protocol: str, whole: Sequence[Fork], wanted: bool) -> None:
        """Record the next-token distributions of the full cache, and measure the cells that keep all entries.

        Args:
            whole: decoded forks of this protocol that keep all entries. If empty, the full cache's answer is decoded here.
            wanted: whether further forks of this protocol will be compared with the full cache.
        """
        ok = [fork for fork in whole if fork.result.status == "ok"]
        if self.extras.fidelity and (ok or (wanted and not whole)):
            with self._aside(f"the full cache's answer under {protocol}"):
                tokens: Sequence[int] = self.extras.reference if self.extras.continuation else ()
                tokens = tokens or (ok[0].result.token_ids if ok else self._answer(protocol).tokens)
                with borrow(self.prefilled, protocol) as cache:
                    blocks = [block[0].cpu() for block in self._forced(cache, 1, protocol, tokens)]
                self.answers[protocol] = tokens, torch.cat([block.to(blocks[-1].dtype) for block in blocks])
        if ok and protocol in self.answers:
            with self._aside(f"full against full under {protocol}"):
                self._floor(protocol, [fork.result for fork in ok])
        if self.extras.reference and any(fork.result.reference_nll is None for fork in ok):
            with self._aside("the reference answer"), borrow(self.prefilled, protocol) as cache:
                self._fill_reference([fork.result for fork in ok], cache, 1, protocol, False)
        if self.extras.samples:
            for fork in ok:
                if fork.cell.compressor.is_full:
                    with self._aside("sampled answers"):
                        fork.result.reference_samples = [self._sampled(protocol, seed) for seed in SEEDS]

    def forks(
        self, forks: Sequence[Fork], cache: CompressedCache | None, gather: Callable[[], CompressedCache]
    ) -> None:
        """Measure fidelity and likelihood of a batch of forks before the batch is decoded.

        Args:
            cache: the forks' reduced entries, one row each; None if decode policies act on the entries.
            gather: function that returns a copy of the forks' entries, for decode policies.
        """
        protocol, results = forks[0].cell.protocol, [fork.result for fork in forks]
        # A batch that failed while decoding comes again in halves: earlier measurements stay.
        if protocol in self.answers and any(result.forced_kl is None for result in results):
            with self._aside(f"fidelity of {_names(forks)}"):
                self._fed(self._fill_fidelity, results, cache, gather, protocol)
        if self.extras.reference and any(result.reference_nll is None for result in results):
            with self._aside(f"the reference answer with {_names(forks)}"):
                self._fed(self._fill_reference, results, cache, gather, protocol)

    # ------------------------------------------------------------------ inside
    # Copies made for a measurement live in these frames only: they are gone when the peak is set aside.

    def _fed(
        self,
        fill: Callable[..., None],
        results: Sequence[ForkResult],
        cache: CompressedCache | None,
        gather: Callable[[], CompressedCache],
        protocol: str,
    ) -> None:
        """Call `fill` with the batch's cache and restore the cache; without a cache, call `fill` with a copy, token by token."""
        if cache is None:
            fill(results, gather(), len(results), protocol, stepwise=True)
            return
        with returned(cache):
            fill(results, cache, len(results), protocol, stepwise=False)

    def _floor(self, protocol: str, results: Sequence[ForkResult]) -> None:
        # In half precision results depend on the shape of a batch; stepping is the shape that differs most from one pass.
        stepwise = self.group.model.dtype != torch.float32
        copy = copied(self.prefilled, protocol, self.group.reserve(protocol))
        self._fill_fidelity(results, copy, 1, protocol, stepwise)

    def _forced(
        self, cache: CompressedCache, rows: int, protocol: str, tokens: Sequence[int], stepwise: bool = False
    ) -> Iterator[Tensor]:
        return forced(self.group, cache, rows, protocol, tokens, stepwise=stepwise, deadline=self.deadline)

    def _fill_fidelity(
        self, results: Sequence[ForkResult], cache: CompressedCache, rows: int, protocol: str, stepwise: bool
    ) -> None:
        """Fill KL divergence and top-1 agreement of each result and, for `continuation`, the likelihood.

        results: one per row of the cache, or several that share the only row.
        """
        tokens, full_logits = self.answers[protocol]
        fed = torch.tensor(tokens, device=self.group.prompt.input_ids.device)
        value_blocks: tuple[list[Tensor], list[Tensor], list[Tensor]] = [], [], []
        start = 0
        for block in self._forced(cache, rows, protocol, tokens, stepwise):
            token_slice = slice(start, start + block.shape[1])
            start = token_slice.stop
            nll = negative_log_likelihood(block, fed[token_slice]) if self.extras.continuation else block[..., 0]
            for blocks, values in zip(
                value_blocks, (*divergence(full_logits[token_slice].to(block.device), block), nll), strict=True
            ):
                blocks.append(values.cpu())
        kl, agree, nlls = (torch.cat(part, 1).tolist() for part in value_blocks)
        for number, result in enumerate(results):
            row = min(number, rows - 1)
            if self._finite("fidelity", kl[row], result):
                result.forced_kl, result.forced_agree = kl[row], agree[row]
                result.reference_nll = nlls[row] if self.extras.continuation else result.reference_nll

    def _fill_reference(
        self, results: Sequence[ForkResult], cache: CompressedCache, rows: int, protocol: str, stepwise: bool
    ) -> None:
        tokens = torch.tensor(self.extras.reference, device=self.group.prompt.input_ids.device)
        blocks, start = [], 0
        for block in self._forced(cache, rows, protocol, self.extras.reference, stepwise):
            blocks.append(negative_log_likelihood(block, tokens[start : start + block.shape[1]]).cpu())
            start += block.shape[1]
        nll = torch.cat(blocks, 1).tolist()
        for number, result in enumerate(results):
            row = min(number, rows - 1)
            if self._finite("the reference answer", nll[row], result):
                result.reference_nll = nll[row]

    def _answer(self, protocol: str, pick: Callable[[Tensor], Tensor] = greedy) -> Decoded:
        """Decode the full cache's answer; greedy unless `pick` samples."""
        with borrow(self.prefilled, protocol) as cache:
            (answer,) = decode(self.group, cache, 1, protocol, self.deadline, pick=pick)
        if answer.error is not None:
            raise answer.error
        return answer

    def _sampled(self, protocol: str, seed: int) -> str:
        answer = self._answer(protocol, Sampler(seed, self.group.prompt.identity))
        return self.group.rules.text(answer.tokens, answer.finish, self.group.tokenizer)

    def _finite(self, what: str, values: Iterable[float], result: ForkResult) -> bool:
        if all(map(math.isfinite, values)):
            return True
        log.warning("%s: %s of cell %s is not finite and is left out", self.group.prompt.identity, what, result.cell)
        return False

    @contextmanager
    def _aside(self, what: str) -> Iterator[None]:
        """Exclude the `with` block from times and memory peaks; log and suppress the block's errors."""
        with self.group.meter.aside():
            failed = False
            limit = self.group.timeout_s
            self.deadline = None if limit is None else time.monotonic() + limit
            try:
                yield
            except Exception as error:  # noqa: BLE001 - a measure that is missing is no reason to lose an answer
                failed = True
                log.warning("%s: %s could not be measured: %s", self.group.prompt.identity, what, describe(error))
            if failed:  # not in the handler, whose traceback holds tensors
                self.group.meter.device.release()


def _names(forks: Sequence[Fork]) -> str:
    return f"cell {forks[0].cell.cell}" if len(forks) == 1 else f"{len(forks)} cells from {forks[0].cell.cell} on"
