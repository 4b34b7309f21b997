"""`midstream doctor --plan`: memory and time that serving a checkpoint would need, without starting
anything.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.base.settings import Settings
from .checks.finding import Finding

if TYPE_CHECKING:
    from ...workers.engine.plan import Plan

MIB = 1 << 20


def planned(
    checkpoint: str,
    settings: Settings,
    *,
    gpu: bool,
    tokens_per_second: float,
    gpu_memory_gib: float,
) -> "Plan":
    """Plan for a folder with a config.json, by default the settings' model.

    Raises MidstreamError.
    """
    from ...workers.engine.dtype import choose
    from ...workers.engine.plan import model_of, plan
    from ...workers.runner.hooks.architectures import UnsupportedArchitectureError

    file = Path(checkpoint or settings.model).expanduser() / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        model = model_of(config, choose(settings.dtype, config, gpu=gpu).dtype)
        return plan(
            model,
            settings,
            gpu=gpu,
            tokens_per_second=tokens_per_second,
            gpu_bytes=int(gpu_memory_gib * 2**30),
            host_bytes=host_bytes(),
        )
    except OSError as error:
        raise MidstreamError(
            "not_found", f"{file}: {error.strerror}", allowed="the folder of a checkpoint"
        ) from error
    except (msgspec.DecodeError, KeyError, UnsupportedArchitectureError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise MidstreamError("invalid_request", f"{file}: {missing}") from error


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def facts(plan: "Plan") -> dict[str, Any]:
    """Return a plan for JSON output."""
    model = {
        name: value
        for name, value in plan.model._asdict().items()
        if name not in ("variant", "linears", "inside")
    }
    return {
        "model": model,
        "hooks": plan.hooks,
        "layers": plan.layers,
        "ring_rows": plan.ring.rows if plan.ring else 0,
        "step_s": plan.step_s,
        "memory": [part._asdict() for part in plan.memory],
        "work": [{**work._asdict(), "cost": vars(work.cost)} for work in plan.work],
        "streams": [stream._asdict() for stream in plan.streams],
        "limits": plan.limits,
    }


def findings(plan: "Plan") -> Iterator[Finding]:
    """Yield a plan's facts: the memory of each rank, at most; what is added to a decode step; what
    is written to the disk if every request is captured at every token; and limits.
    """
    model = plan.model
    weights = (
        f", {model.parameters * model.weight_bytes / (1 << 30):.1f} GiB quantised"
        if model.weight_bytes
        else ""
    )
    parameters = f"{model.parameters / 1e9:.2f} B parameters{weights}"
    shape = f"{model.layers} layers × {model.hidden_size}, {model.dtype}, {parameters}"
    facts = [("model", f"{model.architecture}: {shape}"), ("hooks", ", ".join(plan.hooks))]
    for part in plan.memory:
        setting = f" ({part.setting})" if part.setting else ""
        facts.append((part.name, f"{_memory(part.bytes, part.where)}: {part.about}{setting}"))
    for where in ("GPU", "host"):
        total = sum(part.bytes for part in plan.memory if part.where == where)
        facts.append((f"total {where}", f"{_memory(total, where)} of a rank, at most"))
    if plan.work:
        facts.append(
            (
                "decode step",
                f"stock vLLM takes {plan.step_s * 1e3:.1f} ms (estimates for an H200); added:",
            )
        )
    for work in plan.work:
        cost = work.cost
        amounts = (
            f"{work.step:<16} {cost.launches:4} launches, {cost.bytes / 1e6:6.1f} MB on the GPU, "
            f"{cost.host_bytes / 1e6:6.1f} MB to the host: {cost.seconds * 1e3:.2f} ms, "
            f"{work.share:.1%}"
        )
        facts.append((work.hooks, amounts))
    facts += [
        (
            "disk",
            f"{stream.captured}, of every token: {stream.token_bytes / 1024:.0f} KiB per "
            f"token, {stream.bytes_per_s / 1e6:.0f} MB/s",
        )
        for stream in plan.streams
    ]
    facts += [("limit", limit) for limit in plan.limits]
    yield from (Finding("info", about, found) for about, found in facts)


def _memory(count: int, where: str) -> str:
    return f"{count / MIB:8.1f} MiB on the {where}"
