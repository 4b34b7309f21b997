"""Has what the measurements of `midstream doctor --deep` use: both servers, and requests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from midstream.client.sdk.client import Client
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.certificates import Certificate
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.settings.settings import Settings

from ..processes import wait_for
from ..supervisor import Supervisor

#: Prompts of a call, and their tokens.
BATCH = 32
LENGTH = 48
#: Tokens that a request generates whose rows or receipts are looked at.
OWN_TOKENS = 4
HTTP_S = 600.0
#: Every layer at one hook.
LAYERS = {"layers": "all", "hook": "post_block"}
EVERY_ROW = {**LAYERS, "positions": "all_prompt"}
#: Standard deviation of a steering vector's elements: small where only time is measured, large
#: where an edit that reaches a neighbour must be seen.
GENTLE = 0.01
STRONG = 4.0


@dataclass
class Rig:
    """Both servers, and requests to Midstream."""

    settings: Settings  # of both servers
    stack: Supervisor
    client: Client
    stock: str  # address of stock vLLM's server
    seconds: float  # for the timed pairs
    killed: Sequence[str]  # the processes to kill
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    @cached_property
    def card(self) -> dict[str, Any]:
        """The model as the service describes it."""
        return self.client.model(self.settings.served_model)

    @property
    def certificate(self) -> Certificate | None:
        return msgspec.convert(self.card.get("certificate"), Certificate | None, strict=False)

    def prompts(self, count: int, length: int = LENGTH) -> list[list[int]]:
        """Return random prompts, without the special tokens at the ends of the vocabulary."""
        size = self.card["vocab_size"]
        drawn: list[list[int]] = self.rng.integers(
            size // 8, size // 2, size=(count, length)
        ).tolist()
        return drawn

    def steering(self, size: float) -> list[dict[str, Any]]:
        """Return steering of every token in every layer by a random vector."""
        vector = size * self.rng.standard_normal(self.card["hidden_size"])
        return [{**LAYERS, "positions": "all", "vector": vector.astype(np.float32)}]

    def submit(self, prompts: list[list[int]], tokens: int, **fields: Any) -> JobView:
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        return self.client.submit(
            model=self.card["id"], prompts=prompts, sampling=sampling, **fields
        )

    def await_start(self, job: str) -> None:
        wait_for(lambda: self.client.jobs.get(job).state != "queued", HTTP_S)

    def rows(self, prompts: list[list[int]], **fields: Any) -> tuple[np.ndarray, int]:
        """Capture prompts; return the rows of the first, and the engine step in which its request
        ended.
        """
        job = self.submit(prompts, OWN_TOKENS, capture=EVERY_ROW, **fields).id
        self.client.wait(job, HTTP_S)
        with self.client.capture(job) as reader:
            return reader.stack(), self.step(job)

    def step(self, job: str) -> int:
        """Return the engine step in which a job's first request ended."""
        determinism = self.client.result(job).determinism
        if determinism is None:
            raise MidstreamError("internal", f"job {job} has no receipts")
        return determinism.stages[0].ranks[0].step
