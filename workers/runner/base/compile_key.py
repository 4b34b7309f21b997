"""What compiled graphs depend on: part of the key of vLLM's compile cache."""

import zlib
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ....kernels.plan import COLUMNS, ROWS_PER_TOKEN, Buffers
from ....schemas.requests.interventions import EVERY, SCALARS
from .config import PlaneConfig

KEY = "midstream"


def layout(config: PlaneConfig) -> dict[str, Any]:
    """Return the entry of `additional_config` with all that a compiled graph depends on."""
    kernels = (
        tuple(family.name for family in EVERY),
        SCALARS,
        COLUMNS,
        ROWS_PER_TOKEN,
        tuple(field.name for field in fields(Buffers)),
    )
    shapes = (
        config.hooks,
        config.inside,
        config.steering_rows,
        config.steering_entries,
        config.step_tokens,
        config.step_rows,
        kernels,
    )
    return {KEY: {"version": config.version, "buffers": str(shapes), "code": traced_code()}}


@cache
def traced_code() -> str:
    """Return the CRC32 (8 hex digits) of the modules whose calls are in compiled graphs, so that
    graphs compiled from other code are not reused.
    """
    runner = Path(__file__).parents[1]
    checksum = 0
    for file in (
        *sorted((runner.parents[1] / "kernels").glob("*.py")),
        runner / "hooks" / "sites.py",
        runner / "plane" / "inside_hooks.py",
    ):
        checksum = zlib.crc32(file.name.encode() + file.read_bytes(), checksum)
    return f"{checksum:08x}"
