"""What must vLLM's scheduler do differently? Tell the ranks how a request ended, and keep the prefix cache honest.

Named by `scheduler_cls`, so it runs in the engine-core process. Importing it patches the one function there that
decides what a KV block's hash covers.
"""

from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from .process import die_with_parent
from .step import Finish

_KEY = "midstream"
_ATTRIBUTE = "midstream_finishes"

die_with_parent()


def _spec(request: Any) -> dict[str, Any] | None:
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    return extra.get(_KEY) if extra else None


def finishes(scheduler_output: Any) -> dict[str, Finish]:
    """How the requests with a spec ended that this step tells the ranks about."""
    return getattr(scheduler_output, _ATTRIBUTE, {})


class _Midstream:
    """Mixed in front of a vLLM scheduler."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._midstream_finished: dict[str, Finish] = {}
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        manager.get_computed_blocks = _capped(manager, manager.get_computed_blocks)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if _spec(request) is not None:
            aborted = request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR)
            self._midstream_finished[request.request_id] = Finish(list(request.all_token_ids), aborted)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._midstream_finished:
            told = {
                request_id: self._midstream_finished.pop(request_id)
                for request_id in output.finished_req_ids
                if request_id in self._midstream_finished
            }
            setattr(output, _ATTRIBUTE, told)
        return output


class MidstreamScheduler(_Midstream, Scheduler):
    """For engines without asynchronous scheduling."""


class MidstreamAsyncScheduler(_Midstream, AsyncScheduler):
    """For engines with asynchronous scheduling."""


def _capped(manager: Any, original: Any) -> Any:
    """Cached blocks are reused only below the lowest prompt position that the request wants captured."""

    def get_computed_blocks(request: Any) -> Any:
        spec = _spec(request)
        lowest = -1 if spec is None else spec.get("lowest_captured", -1)
        if lowest < 0:
            return original(request)
        coordinator = manager.coordinator
        find = coordinator.find_longest_cache_hit

        def find_below(block_hashes: Any, max_length: int) -> Any:
            return find(block_hashes, min(max_length, lowest))

        coordinator.find_longest_cache_hit = find_below
        try:
            return original(request)
        finally:
            del coordinator.find_longest_cache_hit

    return get_computed_blocks


def _install_block_keys() -> None:
    original = kv_cache_utils.generate_block_hash_extra_keys

    def with_interventions(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        """Blocks at or after the first affected position carry the interventions' digest; those below stay shared."""
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        spec = _spec(request)
        if spec and spec.get("digest") and end_token_idx > spec["first_affected"]:
            # A longer prompt with the same beginning (the next turn of a chat) is touched otherwise from here on.
            prompt_tokens = spec["prompt_tokens"] if spec["by_prompt"] and end_token_idx >= spec["prompt_tokens"] else 0
            keys = (*(keys or ()), (_KEY, spec["digest"], prompt_tokens))
        return keys, next_mm_idx

    kv_cache_utils.generate_block_hash_extra_keys = with_interventions


_install_block_keys()
