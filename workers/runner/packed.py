"""What is in a packed capture file? One request's rows of one pipeline stage, and the manifest beside them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import __version__
from ...schemas.selectors import select
from ...schemas.specs import RankSpec, StoredCapture
from ..storage import PendingFile
from .capture import Recording

FORMAT = "midstream.packed.1"


def expected_positions(capture: StoredCapture, prompt_tokens: int, num_tokens: int) -> list[int]:
    """What must have been recorded when a request of `num_tokens` ended: its last token was never fed back."""
    return list(select(capture.positions, 0, num_tokens - 1, prompt_tokens)) if num_tokens > prompt_tokens else []


def packed_file(
    spec: RankSpec, recording: Recording, token_ids: list[int], *, hidden_size: int, dtype: str, worker: str, rank: int, pp: int
) -> PendingFile:
    """The file of one finished request; `token_ids`: all of it, prompt and generated.

    Rows of `recording` become tensors `<hook>.<layer>` `[positions, hidden_size]`; positions and their token ids go with
    them as int64. Raises RuntimeError when a row that should be there is not.
    """
    capture = recording.spec
    positions, rows = recording.finish(before=len(token_ids) - 1)
    expected = expected_positions(capture, spec.prompt_tokens, len(token_ids))
    if positions != expected:
        missing = sorted(set(expected) - set(positions))
        raise RuntimeError(f"positions {missing[:8]} were not recorded ({len(missing)} of {len(expected)})")
    count, chosen = len(positions), [token_ids[position] for position in positions]
    tensors: list[tuple[str, str, Sequence[int], Sequence[Any]]] = [
        (f"{capture.hook}.{layer}", dtype, [count, hidden_size], rows[layer]) for layer in recording.layers
    ]
    for name, values in (("positions", positions), ("token_ids", chosen)):
        tensors.append((name, "int64", [count], [np.array(values, dtype="<i8").tobytes()]))
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "job": spec.job,
        "request": spec.request,
        "attempt": spec.attempt,
        "worker": worker,
        "rank": rank,
        "pp": pp,
        "hook": capture.hook,
        "layers": recording.layers,
        "dtype": dtype,
        "hidden_size": hidden_size,
        "prompt_tokens": spec.prompt_tokens,
        "positions": positions,
        "token_ids": chosen,
    }
    path = f"{capture.tag}/{spec.job}/p{spec.request:04d}.a{spec.attempt}.pp{pp}.safetensors"
    return PendingFile(path, tensors, manifest, rows=count * len(recording.layers), layers=recording.layers, positions=count)
