"""The judge of a run: its settings checked before any work, its ledger for the score stage, and what to say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mmkv_bench.config.schema import allowed
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from mmkv_bench.judging.ledger import Ledger

NOT_JUDGED = "not judged"  # begins the reason of a metric that lacks answers of a judge (evaluation/not_judged.py)
_WHOLE = {"retries": 0, "concurrency": 1}


def check_judge(config: DictConfig) -> None:
    """Raises ConfigError naming the key that cannot be meant."""
    judge = config.judge
    for key, least in _WHOLE.items():
        if judge[key] < least:
            raise ConfigError(f"judge.{key}={judge[key]} is too small; allowed: {allowed(f'judge.{key}')}; give one")
    if not judge.timeout_s > 0:
        raise ConfigError(
            f"judge.timeout_s={judge.timeout_s} is no time limit; allowed: {allowed('judge.timeout_s')}; give one"
        )
    for key in ("backoff_s", "temperature"):
        if judge[key] is not None and not judge[key] >= 0:
            raise ConfigError(f"judge.{key}={judge[key]} is too small; allowed: {allowed(f'judge.{key}')}; give one")
    if judge.kind == "none" and (judge.url is not None or judge.model is not None):
        raise ConfigError(
            "judge.url or judge.model is set and judge=none asks nobody; allowed: judge=local or judge=openai; choose "
            "one, or drop the key"
        )
    if "@" in str(judge.url or "").partition("://")[2].partition("/")[0]:
        raise ConfigError(
            "judge.url holds a user's name or password, which rows would keep; allowed: an address without them; put the "
            "key into an environment variable and name it with judge.key_env"
        )


def ledger_of(config: DictConfig, root: Path) -> Ledger:
    """The ledger of a run whose rows are in `root`. Nothing is asked and no file is made yet.

    Raises ConfigError when a judge is wanted whose model or address is not given.
    """
    from mmkv_bench.judging.judge_config import JudgeSettings
    from mmkv_bench.judging.ledger import Ledger

    judge = config.judge
    if judge.kind == "none":
        return Ledger()
    if not judge.model:
        raise ConfigError(
            f"judge={judge.kind} has no model; allowed: an id that the endpoint knows; give judge.model=<id>"
        )
    if not _is_address(str(judge.url or "")):
        raise ConfigError(
            f"judge.url={judge.url} is no address; allowed: a base url such as http://127.0.0.1:8000/v1; give judge.url"
        )
    return Ledger(
        JudgeSettings(
            model=str(judge.model),
            url=str(judge.url),
            key_env=judge.key_env,
            timeout_s=float(judge.timeout_s),
            retries=judge.retries,
            backoff_s=float(judge.backoff_s),
            concurrency=judge.concurrency,
            temperature=None if judge.temperature is None else float(judge.temperature),
            cache=Path(judge.cache).expanduser() if judge.cache else root / "judge",
        )
    )


def summary(ledger: Ledger, metrics: Sequence[Mapping[str, Any]]) -> str | None:
    """What became of a run's questions, and which of its metrics are not judged; None when nobody is asked anything.

    metrics: the `metrics` rows of the run's cells.
    """
    lines = []
    counts, open_rows = ledger.counts, [row for row in metrics if not_judged(row)]
    if ledger.settings is not None and counts:
        kept = f"{counts['cached']} answers found in {ledger.settings.cache}"
        lost = f", {counts['failed']} questions without an answer ({ledger.gone or ledger.first_failure})"
        lines.append(f"judge {ledger.model}: {counts['asked']} answers, {kept}{lost * bool(counts['failed'])}")
    earlier = sorted({row["judge"] for row in metrics if row["judge"] not in (None, ledger.model)})
    if ledger.settings is not None and earlier:
        lines.append(
            f"scores of {', '.join(earlier)} stand where {ledger.model} has not answered for all that they judged"
        )
    if open_rows:
        names = ", ".join(sorted({f"{row['dataset']} {row['metric']}" for row in open_rows}))
        cells = len({row["cell"] for row in open_rows})
        lines.append(
            f"not judged: {names} ({cells} cells); the same command with stage=score and a judge that answers "
            "(judge=openai, or judge=local judge.url=<base url> judge.model=<id>) judges what is missing"
        )
    return "\n".join(lines) or None


def not_judged(row: Mapping[str, Any]) -> bool:
    """Whether a `metrics` row lacks answers of a judge."""
    return str(row["lmms_eval_reason"] or "").startswith(NOT_JUDGED)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
