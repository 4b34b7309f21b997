"""Measures what Midstream adds to a call, relative to stock vLLM's own server."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np

from midstream.schemas.base.errors import MidstreamError

from .finding import CheckFinding
from .promises import judge
from .rig import BATCH, EVERY_ROW, GENTLE, HTTP_S, LAYERS, LENGTH, Rig

#: The least and the most tokens that each prompt generates. The number is chosen so that a call to
#: stock vLLM takes about `CALL_S`: what the service adds once per call must not hide in short
#: calls, nor decide them.
TOKENS = 16
MOST_TOKENS = 512
CALL_S = 1.5
LEAST_PAIRS = 4
MOST_PAIRS = 40


def costs(rig: Rig) -> Iterator[CheckFinding]:
    """Time the same calls to both servers in turns; judge the ratios of each round.

    An idle call is compared with stock vLLM; the others with the faster of these two.
    """
    prompts = rig.prompts(BATCH)
    name = rig.card["id"]
    source = rig.submit(prompts[:1], 1, capture=EVERY_ROW)
    rig.client.wait(source.id, HTTP_S)
    kinds: dict[str, dict[str, Any]] = {
        "stock": {},
        "idle": {},
        "capture": {"capture": EVERY_ROW, "capture_wait": True},
        "steer": {"steering": rig.steering(GENTLE)},
        "patch": {"patch": [{**LAYERS, "positions": [LENGTH - 1], "source": {"run": source.id}}]},
    }

    def timed(kind: str, tokens: int) -> float:
        sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        if kind == "stock":
            body = {"model": name, "prompt": prompts, **sampling}
            response = httpx2.post(f"{rig.stock}/v1/completions", json=body, timeout=HTTP_S)
            response.raise_for_status()
            raw = response.json()
        else:
            answer = rig.client.completion(name, prompts, **sampling, **kinds[kind])
            raw = answer.raw
        seconds = time.perf_counter() - start
        if (made := raw["usage"]["completion_tokens"]) != BATCH * tokens:
            raise MidstreamError("internal", f"{kind}: {made} tokens instead of {BATCH * tokens}")
        if kind == "capture":
            rig.client.captures.delete(answer.job)
        return seconds

    for kind in kinds:
        timed(kind, TOKENS)
    room = min(MOST_TOKENS, rig.card["max_model_len"] - LENGTH)
    tokens = max(1, min(room, max(TOKENS, round(TOKENS * CALL_S / timed("stock", TOKENS)))))
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    end = time.monotonic() + rig.seconds
    pairs = 0
    while pairs < LEAST_PAIRS or (time.monotonic() < end and pairs < MOST_PAIRS):
        for kind in [*kinds] if pairs % 2 else [*kinds][::-1]:
            taken[kind].append(timed(kind, tokens))
        pairs += 1
    medians = {kind: float(np.median(seconds)) for kind, seconds in taken.items()}
    # where our idle call is faster than stock vLLM, an edit must not hide its cost behind that
    faster = min("stock", "idle", key=lambda kind: medians[kind])
    for kind in [kind for kind in kinds if kind != "stock"]:
        base = "stock" if kind == "idle" else faster
        yield judge(
            kind,
            [ours / other for ours, other in zip(taken[kind], taken[base], strict=True)],
            f"{medians[kind]:.2f} s, {base} {medians[base]:.2f} s; "
            f"{BATCH} prompts × {LENGTH} + {tokens} tokens, {pairs} pairs",
        )
