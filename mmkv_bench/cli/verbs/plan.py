"""`mmkv-bench plan`: what a run of these settings would do, what it must take at least, and how much of it is done."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mmkv_bench.cli.grammar import Listed, Parser, amount, configuration, count, overrides_of
from mmkv_bench.errors import ConfigError

if TYPE_CHECKING:
    from mmkv_bench.config.schema import RunConfig
    from mmkv_bench.forecast.forecast import Given
    from mmkv_bench.plan.plan import Plan

SUMMARY = "what a run would do, take and fit on, and how much of it is done; loads nothing"


def options(parser: Parser) -> None:
    """Settings of the run, and what is known of its prompts and of the device."""
    configuration(parser)
    parser.add_argument(
        "--prompt-tokens",
        action=Listed,
        metavar="N",
        help="lengths of prompts to plan for; else those of stored answers, else an assumed one",
    )
    parser.add_argument("--visual-tokens", type=count, metavar="N", help="of each prompt; four of five by default")
    parser.add_argument(
        "--image",
        action=Listed,
        metavar="WxH",
        help="images of a prompt, in pixels, in place of its length; --memory then runs the vision tower too",
    )
    parser.add_argument("--device-memory", type=amount, metavar="GIB", help="memory of the device, in GiB")
    parser.add_argument(
        "--bandwidth", type=amount, metavar="GB/S", help="memory bandwidth for reading, in 10^9 bytes/s"
    )
    parser.add_argument(
        "--matmul", type=amount, metavar="TFLOP/S", help="rate of large products in the model's precision"
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="a device that `--measure` measured, for what these three leave open; where none of them is given, the one of the "
        "kind that computes (a GPU for a sweep's jobs that ask for one) if one alone was measured",
    )
    parser.add_argument(
        "--measure",
        choices=("auto", "cpu", "cuda"),
        help="measure first what this machine's device reaches, keep it, and plan for it (loads torch; seconds)",
    )
    parser.add_argument("--devices", action="store_true", help="list the devices that were measured, and stop")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="count each cell's peak memory by phase in a dry run without numbers (loads torch, no weights; minutes)",
    )
    parser.examples(
        "mmkv-bench plan experiment=demo",
        "mmkv-bench plan model=qwen2_5_vl_7b 'dataset=[docvqa,chartqa]' 'method=[snapkv,mmshift]' 'budget=[64,20%]'",
        "mmkv-bench plan model=qwen2_5_vl_7b budget=10% --prompt-tokens 8192,32768 --device-memory 80 --bandwidth 3350",
        "mmkv-bench plan model=qwen2_5_vl_7b 'method=[snapkv,meda]' --memory --prompt-tokens 32768 --device-memory 24",
        "mmkv-bench plan model=internvl3_8b method=snapkv budget=10% --memory --image 1344x896,1344x896",
    )


def answer(given: argparse.Namespace) -> int:
    """Print it. No model and no data are opened, and no connection is made."""
    if given.devices:
        return _list_devices(given.json)
    from mmkv_bench.config.compose import compose
    from mmkv_bench.config.schema import EFFICIENCY
    from mmkv_bench.plan.plan import outline
    from mmkv_bench.plan.validate import validate

    config = compose(overrides_of(given))
    validate(config)
    launcher = _launcher(overrides_of(given))
    if config.scenario == EFFICIENCY:
        return _efficiency(given, config, launcher)
    plan = outline(config)
    if given.measure:
        given.device = _measured(given)
    told = printed(plan, given, launcher)
    if given.json:
        print(json.dumps(told))
    return 0


def printed(plan: Plan, given: argparse.Namespace, launcher: Mapping[str, Any] | None) -> dict[str, Any]:
    """Prints a plan, and gives it as data.

    Args:
        given: this verb's flags; launcher: `hydra.launcher` where jobs of Slurm do it, else None.
    """
    from mmkv_bench.forecast import text as forecast_text
    from mmkv_bench.forecast import throughput
    from mmkv_bench.forecast.forecast import forecast
    from mmkv_bench.plan import preflight, versions
    from mmkv_bench.run.schedule import document, outlined
    from mmkv_bench.store.store import Store

    store = Store(plan.out)
    standing = plan.standing(store)
    known = forecast(plan, standing, store, _known(given, plan, launcher))
    print(outlined(plan, standing))
    print(forecast_text.foretold(known))
    rates = throughput.rates(plan, standing, store)
    if said := throughput.text(rates):
        print(f"\n{said}")
    told = document(plan, standing) | {"forecast": forecast_text.document(known)}
    told["measured"] = [asdict(rate) | {"hours": rate.hours} for rate in rates]
    for said in (older := versions.other_versions(plan, store)):
        print(f"note       {said}")
    disk = preflight.disk_of(plan, standing, store)
    lacks = preflight.lacking(plan, disk)
    print(preflight.told(disk, lacks, plan.out))
    told |= {"other_versions": older, "disk": asdict(disk), "lacking": [asdict(lack) for lack in lacks]}
    if given.memory:
        from mmkv_bench.forecast import memory as planned_memory

        found, notes = planned_memory.planned(plan, known)
        print(planned_memory.text(found, notes, known.given.memory))
        told["memory"] = planned_memory.document(found, notes)
    return told


def _efficiency(given: argparse.Namespace, config: RunConfig, launcher: Mapping[str, Any] | None) -> int:
    """The same of `scenario=efficiency`, whose settings say which prompts it makes.

    Raises:
        ConfigError: flags that say it, too.
    """
    from mmkv_bench.efficiency import forecast
    from mmkv_bench.efficiency.planned import planned
    from mmkv_bench.efficiency.run import missing
    from mmkv_bench.forecast import text as forecast_text
    from mmkv_bench.plan import preflight
    from mmkv_bench.store.store import Store

    for flag in ("prompt_tokens", "visual_tokens", "image"):
        if getattr(given, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} has no meaning under scenario=efficiency; say it with lengths=[...] and prompts="
            )
    plan = planned(config, outline=True)
    if given.measure:
        given.device = _measured(given)
    todo = missing(plan, Store(plan.out).timings([cell.cell for cell in plan.cells]), list(config.retry))
    known = forecast.forecast(plan, _known(given, forecast.general(plan), launcher), todo)
    print(forecast.outlined(plan, todo))
    print(forecast_text.foretold(known))
    lacks = preflight.weights_lacking(config.model)
    print("\n".join(preflight.said(lacks)), end="\n" * bool(lacks))
    told = forecast.document(plan, todo) | {"forecast": forecast_text.document(known)}
    told["lacking"] = [asdict(lack) for lack in lacks]
    if given.memory:
        from mmkv_bench.forecast import memory as planned_memory

        found, notes = forecast.memory(plan, known)
        print(planned_memory.text(found, notes, known.given.memory))
        told["memory"] = planned_memory.document(found, notes)
    if given.json:
        print(json.dumps(told))
    return 0


def _list_devices(as_json: bool) -> int:
    from mmkv_bench.forecast import device_speed as devices

    found = list(devices.stored().values())
    if as_json:
        print(json.dumps([asdict(speed) | {"device": speed.slug} for speed in found]))
    else:
        print("\n".join(map(str, found)) or f"nothing was measured yet: no file is in {devices.folder()}")
    return 0


def _measured(given: argparse.Namespace) -> str:
    """The name of this machine's device, measured now.

    Raises:
        ConfigError: no such device, or another one is to be planned for.
    """
    if given.device:
        raise ConfigError(
            f"--measure {given.measure} plans for this machine's device; leave out --device {given.device}"
        )
    from mmkv_bench.forecast.device_speed import measured

    speed = measured(given.measure, again=True)
    print(speed)
    return speed.slug


def _launcher(overrides: list[str]) -> Mapping[str, Any] | None:
    """`hydra.launcher` where `launcher=slurm` is among the overrides: what is planned is then a sweep's."""
    from mmkv_bench.config.compose import launcher_of

    return launcher_of(overrides) if any(text.partition("=")[0] == "launcher" for text in overrides) else None


def _kind(config: RunConfig, launcher: Mapping[str, Any] | None) -> str | None:
    """`cpu` or `cuda` of the device that it will run on; None: whatever torch finds here."""
    from mmkv_bench.devices.meant import sign_here

    if config.model.device != "auto":
        return str(config.model.device)
    if launcher is not None and "gpus_per_node" in launcher:
        from mmkv_bench.slurm.checks import gpus_of
        from mmkv_bench.slurm.submission import for_model

        return "cuda" if gpus_of(for_model(launcher, config.slurm, str(config.model.name))) else "cpu"
    return None if sign_here() is None else "cuda"


def _known(given: argparse.Namespace, plan: Plan, launcher: Mapping[str, Any] | None) -> Given:
    """The flags, and what was measured of a device where they leave it open: of the one that `--device` names, or of the only one
    of the kind that will compute where nothing else is said. A number that is given is another device's, and those of two make
    none."""
    from mmkv_bench.forecast import device_speed as devices
    from mmkv_bench.forecast.forecast import GIB, Given

    flags = {"--device-memory": given.device_memory, "--bandwidth": given.bandwidth, "--matmul": given.matmul}
    said = [flag for flag, value in flags.items() if value is not None]
    speed = devices.named(given.device) if given.device else None
    if speed is None and not said:
        kind = _kind(plan.config, launcher)
        measured = [speed for speed in devices.stored().values() if kind in (None, speed.kind)]
        speed = measured[0] if len(measured) == 1 else None
    memory = None if given.device_memory is None else given.device_memory * GIB
    bandwidth = None if given.bandwidth is None else given.bandwidth * 1e9
    rate = None if given.matmul is None else given.matmul * 1e12
    if speed is None or len(said) == len(flags):
        return Given(_tokens(given), given.visual_tokens, _images(given), memory, bandwidth, rate)
    return Given(
        _tokens(given),
        given.visual_tokens,
        _images(given),
        speed.memory_bytes if memory is None else memory,
        speed.bandwidth if bandwidth is None else bandwidth,
        speed.rates.get(plan.cells[0].dtype) if rate is None else rate,
        speed.slug + (f" with {' and '.join(said)} as given" if said else ""),
    )


def _tokens(given: argparse.Namespace) -> list[int]:
    try:
        return [count(text) for text in given.prompt_tokens or ()]
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--prompt-tokens: {error}; give lengths such as 2048,8192") from error


def _images(given: argparse.Namespace) -> list[tuple[int, int]]:
    for text in given.image or ():
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
            raise ConfigError(f"--image {text} is no size in pixels; give width and height, such as 1344x896")
    if given.image and (given.prompt_tokens or given.visual_tokens):
        raise ConfigError("--image says how long a prompt is; leave out --prompt-tokens and --visual-tokens")
    return [(int(width), int(height)) for width, _, height in (text.partition("x") for text in given.image or ())]
