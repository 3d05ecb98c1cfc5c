"""`lmms-eval --model mmkv`: lmms-eval asks and scores, and a method of this project answers as in a run without a
store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mmkv_bench.config.schema import Model, keys
from mmkv_bench.config.shorthand import words
from mmkv_bench.errors import ConfigError, DataError
from mmkv_bench.evaluation.lmms_eval_loop import Respondent
from mmkv_bench.evaluation.samples import Request

if TYPE_CHECKING:
    from lmms_eval.api.instance import Instance

    from mmkv_bench.plan.plan import Plan
    from mmkv_bench.run.generate import Answering

_OF_RUN = ("budget", "protocol", "reading", "seed", "decode", "timeout_s")
_ONE = (None, 1, "1", "auto")


class MMKV(Respondent):
    """A chat model of lmms-eval with a compressor; prompts are answered one by one.

    Args:
        pretrained: a folder, an id on the hub, or a name of conf/model (`tiny`).
        method: a method's name (docs/methods.md) or file.
        dataset: the name that seeds the samples' random numbers (in a run the dataset's label); None: the task's name.
        batch_size, max_batch_size, device: lmms-eval's flags.
        settings: `budget`, `protocol`, `reading`, `seed`, `decode`, `timeout_s` of a run; keys of its `model`
            (`dtype=float32`, `max_pixels=...`); every other name is a parameter of the method (`window=16`).

    Raises:
        MMKVError: an error that would stop the run; or several prompts at a time, or several ranks.
    """

    def __init__(
        self,
        pretrained: str,
        method: str = "full",
        dataset: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        from mmkv_bench.evaluation.environment import require_single_rank

        super().__init__(self._answer)
        require_single_rank()
        if batch_size not in _ONE or max_batch_size not in _ONE:
            raise ConfigError(f"--batch_size {batch_size}: prompts are answered one by one; leave it out, or give 1")
        self.plan, self._dataset = _plan(pretrained, method, device, settings), dataset
        self._rows: list[Mapping[str, Any]] = []

    def _answer(self, instance: Instance) -> str:
        """Return the answer to one request of lmms-eval.

        Raises DataError: there is no answer; lmms-eval would score an empty answer instead.
        """
        from mmkv_bench.models.load import computing_with, threads_for

        request, answering = _request(instance, self.task_dict, self._dataset), self.answering
        self._rows.clear()
        with computing_with(threads_for(answering.loaded, self.plan.model.threads)):
            answering(request)
        (row,) = self._rows
        if row["status"] != "ok":
            raise DataError(f"{request.dataset} {request.sample_id} has no answer ({row['status']}): {row['error']}")
        return str(row["answer"])

    @cached_property
    def answering(self) -> Answering:
        """The generating part of a run with one method and budget; the first use loads the model."""
        from mmkv_bench.run.generate import Answering, compiled_step

        plan = self.plan
        plan.check_machine()
        loaded = plan.load()
        done_samples: dict[str, set[str]] = {cell: set() for cell in plan.names}
        step = compiled_step(loaded, plan.answering)
        return Answering(loaded, plan.answering, plan.cells, done_samples, None, self._rows.extend, step=step)


def _plan(pretrained: str, method: str, device: str | None, settings: Mapping[str, Any]) -> Plan:
    """Return the plan of a run of one method and budget; the plan's dataset is not used. The arguments are those of
    `MMKV`."""
    from mmkv_bench.plan.planner import make_plan
    from mmkv_bench.plan.validate import compose_checked

    model_settings = {name: value for name, value in settings.items() if name in keys(Model)}
    run_settings = {name: value for name, value in settings.items() if name in _OF_RUN}
    parameters = {
        name: value for name, value in settings.items() if name not in model_settings and name not in run_settings
    }
    if device is not None:
        model_settings.setdefault("device", device.partition(":")[0])
    run = {"model": pretrained, "method": method, "baseline": "none", "fidelity": "off", "limit": 1} | run_settings
    method_settings = {"methods": {method: parameters}} if parameters else {}
    plan = make_plan(
        compose_checked(
            [*words(run), *words({"model": model_settings} if model_settings else {}), *words(method_settings)]
        )
    )
    if len(plan.cells) != 1:
        raise ConfigError(
            f"{len(plan.cells)} cells are planned, but only one can answer; give one method, budget, protocol and seed"
        )
    return plan


def _request(instance: Instance, data: Mapping[str, Any], dataset: str | None) -> Request:
    """Convert a request of lmms-eval to a request of a run. data: task -> split -> documents. dataset: see `MMKV`."""
    from mmkv_bench.datasets.messages import to_prompt
    from mmkv_bench.evaluation.documents import greedy

    _, doc_to_messages, settings, doc_id, task, split = instance.args
    doc = data[task][split][doc_id]
    prompt, label = to_prompt(doc_to_messages(doc), task), dataset or task
    own_name = doc.get("sample_id") if task.startswith("pages") else None
    name = own_name or f"{label}-{doc_id:06d}"
    media = prompt.messages, prompt.images, prompt.videos
    return Request(label, name, doc_id, name, None, *media, greedy(settings), "")
