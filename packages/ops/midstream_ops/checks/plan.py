"""`midstream doctor --plan`: memory and time that serving a checkpoint would need, without starting
anything.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.machine import host_bytes
from midstream.schemas.settings.settings import Settings

from .finding import CheckFinding

if TYPE_CHECKING:
    from ..plan import EnginePlan

MIB = 1 << 20


def planned(
    settings: Settings, gpu: bool, tokens_per_second: float, gpu_memory_gib: float
) -> "EnginePlan":
    """Plan for the settings' model, a folder with a config.json.

    Raises MidstreamError.
    """
    from midstream.workers.engine.dtype import choose
    from midstream.workers.runner.hooks.architectures import UnsupportedArchitectureError

    from ..plan import model_of, plan

    file = Path(settings.model).expanduser() / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        return plan(
            model_of(config, choose(settings.vllm.dtype, config, gpu=gpu).dtype),
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


def findings(plan: "EnginePlan") -> Iterator[CheckFinding]:
    """Yield a plan's facts: the memory of each rank, at most; what is added to a decode step; what
    is written to the disk if every request is captured at every token; and limits.

    Figures are bytes of memory; launches, bytes on the GPU and to the host, seconds and the share
    of a step; bytes per token and per second.
    """
    model = plan.model
    weights = (
        f", {model.parameters * model.weight_bytes / (1 << 30):.1f} GiB quantised"
        if model.weight_bytes
        else ""
    )
    parameters = f"{model.parameters / 1e9:.2f} B parameters{weights}"
    shape = f"{model.layers} layers × {model.hidden_size}, {model.dtype}, {parameters}"
    yield _fact("model", f"{model.architecture}: {shape}")
    yield _fact("hooks", ", ".join(plan.hooks))
    for part in plan.memory:
        setting = f" ({part.setting})" if part.setting else ""
        about = f"{_memory(part.bytes, part.where)}: {part.about}{setting}"
        yield _fact(part.name, about, part.bytes)
    for where in ("GPU", "host"):
        total = sum(part.bytes for part in plan.memory if part.where == where)
        yield _fact(f"total {where}", f"{_memory(total, where)} of a rank, at most", total)
    if plan.work:
        stock = f"stock vLLM takes {plan.step_s * 1e3:.1f} ms (estimates for an H200); added:"
        yield _fact("decode step", stock, plan.step_s)
    for work in plan.work:
        cost = work.cost
        amounts = (
            f"{work.step:<16} {cost.launches:4} launches, {cost.bytes / 1e6:6.1f} MB on the GPU, "
            f"{cost.host_bytes / 1e6:6.1f} MB to the host: {cost.seconds * 1e3:.2f} ms, "
            f"{work.share:.1%}"
        )
        figures = (cost.launches, cost.bytes, cost.host_bytes, cost.seconds, work.share)
        yield _fact(work.hooks, amounts, *figures)
    for stream in plan.streams:
        rate = (
            f"{stream.captured}, of every token: {stream.token_bytes / 1024:.0f} KiB per "
            f"token, {stream.bytes_per_s / 1e6:.0f} MB/s"
        )
        yield _fact("disk", rate, stream.token_bytes, stream.bytes_per_s)
    for limit in plan.limits:
        yield _fact("limit", limit)


def _fact(about: str, found: str, *figures: float) -> CheckFinding:
    return CheckFinding("info", about, found, figures=list(figures))


def _memory(count: int, where: str) -> str:
    return f"{count / MIB:8.1f} MiB on the {where}"
