"""`midstream doctor --plan`: memory and time that serving a checkpoint would need, without starting
anything.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.base.settings import Settings

if TYPE_CHECKING:
    from ...workers.engine.plan import Plan, Work

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


def lines(plan: "Plan", tokens_per_second: float) -> Iterator[str]:
    """Yield a plan as text, with tables in Markdown."""
    model = plan.model
    weights = (
        f", {model.parameters * model.weight_bytes / (1 << 30):.1f} GiB quantised"
        if model.weight_bytes
        else ""
    )
    parameters = f"{model.parameters / 1e9:.2f} B parameters{weights}"
    yield (
        f"{model.architecture}: {model.layers} layers × {model.hidden_size}, "
        f"{model.dtype}, {parameters}"
    )
    yield f"hooks: {', '.join(plan.hooks)}"
    yield ""
    yield "Memory of each rank, at most:"
    yield ""
    rows = [
        [part.name, part.where, _mib(part.bytes), part.about, part.setting] for part in plan.memory
    ]
    for where in ("GPU", "host"):
        if total := sum(part.bytes for part in plan.memory if part.where == where):
            rows.append(["**total**", where, _mib(total), "", ""])
    yield from _table(["part", "in", "MiB", "holds", "setting"], rows)
    if plan.work:
        yield ""
        yield (
            "Added to a decode step, estimated for an H200, where stock vLLM takes "
            f"{plan.step_s * 1e3:.1f} ms:"
        )
        yield ""
        rows = [
            [work.hooks, work.step, str(work.cost.launches), *_cost(work)] for work in plan.work
        ]
        yield from _table(
            ["hooks", "step", "launches", "MB on the GPU", "MB to the host", "ms", "share"], rows
        )
    yield ""
    yield (
        "Written to the disk, if every request is captured at every token "
        f"({tokens_per_second:.0f} tokens/s):"
    )
    yield ""
    rows = [
        [stream.captured, f"{stream.token_bytes / 1024:.0f}", f"{stream.bytes_per_s / 1e6:.0f}"]
        for stream in plan.streams
    ]
    yield from _table(["captured", "KiB per token", "MB/s"], rows)
    yield ""
    yield "Limits:"
    yield ""
    yield from (f"- {limit}" for limit in plan.limits)


def _cost(work: "Work") -> list[str]:
    cost = work.cost
    return [
        f"{cost.bytes / 1e6:.1f}",
        f"{cost.host_bytes / 1e6:.1f}",
        f"{cost.seconds * 1e3:.2f}",
        f"{work.share:.1%}",
    ]


def _mib(count: int) -> str:
    return f"{count / MIB:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, aligned so that they are readable as plain text."""
    wide = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, ["---"] * len(wide), *rows):
        yield (
            "| "
            + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, wide, strict=True))
            + " |"
        )
