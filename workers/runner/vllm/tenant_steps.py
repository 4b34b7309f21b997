"""Part of our scheduler: tenants take turns in it, and it learns how long steps take."""

import time
from collections.abc import Container
from typing import Any

from .tenant_turns import TenantTurns

#: Attribute of a step's output: when it was composed, in seconds of `time.perf_counter`.
_COMPOSED = "midstream_composed"


class TenantSteps:
    """Mix-in of vLLM's schedulers, below that which composes steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        self._turns = TenantTurns(
            self.policy,  # type: ignore[attr-defined]
            self.max_num_scheduled_tokens,  # type: ignore[attr-defined]
            1 + config.num_speculative_tokens,
            self.max_num_active_reqs,  # type: ignore[attr-defined]
            splits=bool(self.scheduler_config.enable_chunked_prefill)  # type: ignore[attr-defined]
            and not self.need_mamba_block_aligned_split,  # type: ignore[attr-defined]
        )
        self.waiting = self._turns.waiting
        self._last_ended = 0.0  # when the last step ended, as `_COMPOSED`

    def add_request(self, request: Any) -> None:
        self._turns.join(request)
        super().add_request(request)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._turns.leave(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def free_places(self) -> int:
        """Return how many requests may join the step that begins, after one has given its place to
        another tenant if it has to.
        """
        running = self.running  # type: ignore[attr-defined]
        free: int = self.max_num_active_reqs - len(running)  # type: ignore[attr-defined]
        crowding = self._turns.crowding(running, free)
        if crowding is None:
            return free
        running.remove(crowding)
        self._preempt_request(crowding, time.monotonic())  # type: ignore[attr-defined]
        return free + 1

    def divide(self, places: int, waits: Container[str]) -> bool:
        """Divide the step, see `TenantTurns.divide`."""
        return self._turns.divide(
            len(self.running),  # type: ignore[attr-defined]
            self._inflight_prefills,  # type: ignore[attr-defined]
            places,
            waits,
        )

    def share(self, request: Any, tokens: int, *, whole: bool) -> int:
        """Return how many of these tokens of a request its tenant's share has, and take them.
        `whole`: all or none.
        """
        if self._turns.left is None:
            return tokens
        return self._turns.take(request, tokens, whole=whole or request.has_encoder_inputs)

    def give_back(self, request: Any, taken: int, computed: int) -> None:
        """Give back what a request took of its share and does not compute in this step."""
        if self._turns.left is not None:
            self._turns.give_back(request, taken, computed)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._turns.end()
        setattr(output, _COMPOSED, time.perf_counter())
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        ended = time.perf_counter()
        if tokens := scheduler_output.total_num_scheduled_tokens:
            # the next step may have been composed while this one ran
            began = max(getattr(scheduler_output, _COMPOSED), self._last_ended)
            requests = len(scheduler_output.num_scheduled_tokens)
            self._turns.pace.learn(tokens - requests, ended - began)
        self._last_ended = ended
        return super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
