"""Extension of vLLM's scheduler: reports to ranks how requests ended, and keeps the prefix cache
correct, and has captures wait for the writers.

vLLM's setting `scheduler_cls` names it, so it runs in the engine-core process. Importing it patches
that process: the contents of KV block hashes, the zeroing of new blocks, and the wait for ranks.
"""

import time
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ....broker.processes.orphans import die_with_parent
from ....schemas.base.records import learn_records
from ....schemas.base.version import __version__
from ....schemas.requests.source_runs import is_row
from ....schemas.requests.specs import RankSpec
from ..base.backlog import Backlog
from ..base.config import plane_config
from ..base.engine_step import EngineLoad, Finish, RequestEnd
from ..base.packed_spec import packed_spec, unpack
from ..base.row_index import Keeping, RequestCaptures, RowIndex
from ..probes.probe_news import ProbeNews, news_of
from ..rows.overload import overloads
from . import idle_sleep, zeroed_blocks
from .cell_steps import CellSteps, RepeatedPrompt
from .kept_blocks import KeptBlocks
from .quarantine import Quarantine, non_finite_in, private
from .ring_budget import RingBudget
from .shallow_steps import ShallowSteps
from .stages import stage_layers
from .tenant_steps import TenantSteps

_KEY = "midstream"
_ID = attrgetter("request_id")
_COMPUTED = attrgetter("num_computed_tokens")
#: Attribute of a step's output: its `StepOrders`.
_ORDERS = "midstream_orders"

#: Seconds between two steps while all running requests wait for the writers.
_PAUSE_S = 0.005
#: With more entries of steering than this, a request waits for one step of those that run, in which
#: ranks lay its rows out.
_MANY = 64
#: With more rows than this known as laid out, all are forgotten: ranks do not keep them forever.
_LAID_OUT = 256
#: Part of every hash that covers an intervention; increasing it prevents reuse of earlier blocks.
_epoch = 0
#: Attribute of a request whose hashes cover an intervention: the epoch of the first such hash.
_HASHED_IN = "midstream_hashed_in"
#: Attribute of a request: its decoded spec, or None.
_SPEC = "midstream_spec"
#: Attribute of a shallow request: the hashes that its blocks had if all layers were computed.
_WHOLE_HASHES = "midstream_whole_hashes"

idle_sleep.install()
zeroed_blocks.install()


def _spec(request: Any) -> RankSpec | None:
    """Return the request's spec; it is decoded at the first call, and kept with the request."""
    if not hasattr(request, _SPEC):
        packed = packed_spec(request.sampling_params)
        setattr(request, _SPEC, None if packed is None else unpack(packed).spec)
    spec: RankSpec | None = getattr(request, _SPEC)
    return spec


class StepOrders(NamedTuple):
    """What the scheduler tells all ranks with a step."""

    # how requests with a spec finished in the engine
    finished: Mapping[str, Finish] = {}
    ends: Sequence[RequestEnd] = ()  # since the last step
    keeping: Keeping | None = None  # which stored rows the ranks serve, keep and drop
    # packed specs of steered requests that arrived since the last step and are not in this one, so
    # that ranks can lay out their rows ahead
    waiting: Sequence[bytes] = ()
    load: EngineLoad = EngineLoad()  # sent to ranks because the worker polls them anyway
    depth: int = 0  # the forward ends after so many layers; 0: after all of them, with the head


def orders_of(scheduler_output: Any) -> StepOrders:
    """Return what a step's output tells the ranks."""
    orders: StepOrders = getattr(scheduler_output, _ORDERS, StepOrders())
    return orders


class _Midstream(TenantSteps):
    """Mix-in of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        die_with_parent()
        learn_records()
        self._midstream_finished: dict[str, Finish] = {}
        self._midstream_ends: list[RequestEnd] = []
        # steered requests that arrived since the last step → packed spec
        self._midstream_arrived: dict[str, bytes] = {}
        self._midstream_long = set[str]()  # those of them whose many entries are new to the ranks
        self._midstream_laid_out = set[str]()  # `SteeringRow.key` of rows of many entries
        _accept_ends()
        # live requests that capture prompt rows
        self._midstream_capturing: dict[str, RequestCaptures] = {}
        self._midstream_bases: dict[str, RepeatedPrompt] = {}  # live requests that repeat a prompt
        self._midstream_chunks: dict[str, int] = {}  # live requests → prompt tokens per step
        # requests with captures or chunks that do not only generate: what limits or keeps the rows
        # of prompts is done for these alone
        self._midstream_filling: set[str] = set()
        self._midstream_limited: Set[str] = frozenset()  # those, and requests that wait
        self._midstream_shallow = ShallowSteps()
        self._midstream_held_out: Set[str] = frozenset()  # by it, of this step
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        vllm_config = self.vllm_config  # type: ignore[attr-defined]
        config = plane_config()
        model = vllm_config.model_config
        hidden = model.get_hidden_size()
        item = model.dtype.itemsize
        block = manager.block_pool.hash_block_size
        self._midstream_rows = RowIndex(config.row_store_mib << 20, hidden * item, block, item)
        stages = stage_layers(
            model.get_total_num_hidden_layers(),
            vllm_config.parallel_config.pipeline_parallel_size,
        )
        self._midstream_ring = RingBudget(
            config.step_rows,
            stages,
            vllm_config.num_speculative_tokens,
            lambda capture: item * (hidden if capture.row is None else capture.row.size),
            [
                overloads(
                    config.capture_overload,
                    config.capture_queue_mib << 20,
                    Backlog.of(config, rank),
                )
                for rank in range(vllm_config.parallel_config.world_size)
            ],
        )
        self._midstream_blocks = KeptBlocks(manager)
        self._midstream_cells = CellSteps(
            self._midstream_bases,
            self._midstream_blocks,
            self.max_num_scheduled_tokens,  # type: ignore[attr-defined]
        )
        self._midstream_quarantine = Quarantine(manager)
        self._midstream_probes = ProbeNews()
        manager.get_computed_blocks = self._capped(manager.get_computed_blocks, block)

    def add_request(self, request: Any) -> None:
        if (spec := _spec(request)) is not None:
            self._join(request, spec)
        # vLLM hashes arriving requests in another thread, so a new epoch may have begun since.
        if getattr(request, _HASHED_IN, _epoch) != _epoch:
            _rehash(request)
        super().add_request(request)

    def _join(self, request: Any, spec: RankSpec) -> None:
        """Record what later steps need from the spec."""
        self._fill(request)
        if spec.depth and spec.version == __version__:
            self._midstream_shallow.join(request.request_id, spec.depth, request.num_tokens)
        if spec.captures and spec.version == __version__:
            self._midstream_ring.join(
                request.request_id,
                spec.captures,
                spec.prompt_tokens,
                request.max_tokens,
                spec.work,
            )
            if spec.lowest_captured >= 0:
                parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
                self._midstream_capturing[request.request_id] = RequestCaptures(
                    spec, tensor_parallel=parallel.tensor_parallel_size > 1
                )
        if spec.base or spec.entry is not None:
            self._midstream_bases[request.request_id] = RepeatedPrompt(
                spec.base,
                max(spec.first_affected, 0),
                spec.entry.layer if spec.entry is not None else 0,
            )
        if spec.chunk:
            self._midstream_chunks[request.request_id] = spec.chunk
        # Ranks lay out no request ahead that uses rows of source runs: a sweep has thousands.
        if spec.digest and not any(
            is_row(name) for entry in spec.steering for name in entry.tensors
        ):
            packed = packed_spec(request.sampling_params)
            if packed is not None:
                self._midstream_arrived[request.request_id] = packed
                if len(spec.steering) > _MANY and self._are_new({row.key for row in spec.rows}):
                    self._midstream_long.add(request.request_id)

    def _are_new(self, rows: set[str]) -> bool:
        """Return whether some of these rows are those of no earlier request. Ranks keep rows, so
        that requests under the same global steering or module need not wait for them again.
        """
        known = self._midstream_laid_out
        new = not rows <= known
        if len(known) > _LAID_OUT:
            known.clear()
        known |= rows
        return new

    def _fill(self, request: Any) -> None:
        """Note that a request is to compute its prompt, or after a preemption all its tokens."""
        spec = _spec(request)
        if spec is not None and (spec.captures or spec.chunk):
            self._midstream_filling.add(request.request_id)

    def midstream_end(self, ends: list[RequestEnd]) -> None:
        """Send ends to all ranks with the next step, which `has_finished_requests` ensures."""
        # With a step, all ranks get an end at the same moment, as their checksums require, and
        # after the abort that the worker sent earlier.
        self._midstream_ends += ends

    def has_finished_requests(self) -> bool:
        """Return True also while ends wait to be sent to the ranks: then vLLM runs a step without
        tokens, if it has no other.
        """
        return bool(self._midstream_ends) or bool(
            super().has_finished_requests()  # type: ignore[misc]
        )

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._midstream_quarantine.leaving(request.request_id)
        if (spec := _spec(request)) is not None:
            aborted = request.status in (
                RequestStatus.FINISHED_ABORTED,
                RequestStatus.FINISHED_ERROR,
            )
            stopped_by = "" if aborted else self._midstream_probes.ended_by(request.request_id)
            # vLLM names ended requests to the ranks, but not their tokens, and a later step may
            # already be running. With these tokens ranks cut surplus rows exactly, and label rows
            # without model outputs.
            self._midstream_finished[request.request_id] = Finish(
                list(request.all_token_ids), aborted, stopped_by
            )
            self._midstream_probes.forget(request.request_id)
            self._midstream_capturing.pop(request.request_id, None)
            self._midstream_ring.leave(request.request_id)
            self._midstream_bases.pop(request.request_id, None)
            self._midstream_chunks.pop(request.request_id, None)
            self._midstream_filling.discard(request.request_id)
            self._midstream_shallow.leave(request.request_id)
            if (
                spec.keep_blocks
                and not spec.depth
                and not spec.digest
                and not aborted
                and self._midstream_quarantine.is_clean(request)
            ):
                self._midstream_blocks.keep(spec.keep_blocks, request)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._midstream_blocks.make_room(stuck=False)
        running = self.running  # type: ignore[attr-defined]
        filling = self._midstream_filling
        waits = self._midstream_ring.look()
        held_out = self._midstream_shallow.held_out(self.requests)  # type: ignore[attr-defined]
        self._midstream_held_out = held_out
        kept_back = waits | held_out if held_out else waits
        places = self.free_places()
        self._midstream_limited = filling | kept_back if kept_back else filling
        with self._midstream_cells.composing(
            running,
            self.waiting,
            kept_back | self._midstream_long if running else kept_back,
        ):
            divided = self.divide(places, kept_back)
            self._bind("_reserve_prefill_lookahead", ours=bool(filling or kept_back or divided))
            if filling or waits:
                self._midstream_ring.begin(
                    list(map(_ID, running)),
                    list(map(_COMPUTED, running)),
                    (request.request_id for request in self.waiting),
                    places,
                )
            output = super().schedule(*args, **kwargs)
            # An empty step with running requests is no problem: these may all be in a step that is
            # still computed, and waiting ones will be scheduled later.
            idle = not output.total_num_scheduled_tokens
            if idle and self.waiting and not self.running:  # type: ignore[attr-defined]
                self._midstream_blocks.make_room(stuck=True)
        if idle and waits and all(request.request_id in waits for request in running):
            time.sleep(_PAUSE_S)
        ended = dict[str, Finish]()
        if self._midstream_finished:
            ended = {
                request_id: self._midstream_finished.pop(request_id)
                for request_id in output.finished_req_ids
                if request_id in self._midstream_finished
            }
        waiting = list[bytes]()
        if self._midstream_arrived:
            scheduled = output.num_scheduled_tokens
            waiting += [
                item for name, item in self._midstream_arrived.items() if name not in scheduled
            ]
            self._midstream_arrived.clear()
            self._midstream_long.clear()
        ends = self._midstream_ends
        self._midstream_ends = []
        keeping = self._keeping(output) if filling or self._midstream_rows.pending else None
        running, queued = self.get_request_counts()  # type: ignore[attr-defined]
        usage = self.kv_cache_manager.usage  # type: ignore[attr-defined]
        load = EngineLoad(running, queued, usage)
        depth = self._midstream_shallow.take(
            output.num_scheduled_tokens,
            self.requests,  # type: ignore[attr-defined]
        )
        setattr(output, _ORDERS, StepOrders(ended, ends, keeping, waiting, load, depth))
        return output

    def _bind(self, name: str, *, ours: bool) -> None:
        """Have vLLM call our method of this name from now on, or its own: it calls these for every
        request in every step, which costs a step of many requests even if ours do nothing.
        """
        if ours:
            self.__dict__.pop(name, None)
        elif name not in self.__dict__:
            self.__dict__[name] = getattr(super(), name)

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Limit a request's tokens in this step to its chunk, and to the room for its rows.

        A lower `max_num_scheduled_tokens` would also limit requests that capture nothing, and would
        have to assume the worst order. vLLM calls this for every request before it schedules the
        request's tokens. A running request without tokens is left out of the step.
        """
        reserve = super()._reserve_prefill_lookahead  # type: ignore[misc]
        whole = request.request_id in self._midstream_bases
        share = 0
        if request.request_id not in self._midstream_held_out:
            share = self.share(request, num_new_tokens, whole=whole)
        if request.request_id not in self._midstream_limited:
            return int(reserve(request, num_computed_tokens, share))
        tokens = share
        if not self.need_mamba_block_aligned_split:  # type: ignore[attr-defined]
            tokens = min(tokens, self._midstream_chunks.get(request.request_id, tokens))
        if tokens:
            tokens = self._midstream_ring.take(request.request_id, num_computed_tokens, tokens)
            self.give_back(request, share, tokens)
        if num_new_tokens > 0 and not tokens:
            # vLLM's runner finds drafts of the step before only
            request.spec_token_ids = []
        return int(reserve(request, num_computed_tokens, tokens))

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        for request_id, position in non_finite_in(model_runner_output):
            request = self.requests.get(request_id)  # type: ignore[attr-defined]
            if self._midstream_quarantine.isolate(request, request_id, position):
                _rehash(request, always=True)
        self._midstream_probes.hear(news_of(model_runner_output))
        self._bind("_update_request_with_output", ours=self._midstream_probes.tell)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._midstream_probes.attach(outputs)
        return outputs

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        """End a request at the token where a probe reaches its threshold; drop later tokens, no
        matter in which step they were computed.
        """
        kept, probe = self._midstream_probes.cut(request, new_token_ids)
        stopped = False
        if kept or not probe:
            kept, stopped = super()._update_request_with_output(  # type: ignore[misc]
                request, kept, *args, **kwargs
            )
        if probe and not stopped:
            # With the status of a stop token, vLLM would omit the last token from the text.
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            stopped = True
            self._midstream_probes.end(request.request_id, probe)
        return kept, stopped

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop kept rows and blocks, and change the hashes of steered blocks, so that earlier ones
        are not found again.

        This takes effect even if vLLM is busy and keeps its blocks; returns whether vLLM reset its
        cache.
        """
        global _epoch
        _epoch += 1
        self._midstream_rows.clear()
        self._midstream_blocks.clear()
        for request in self.requests.values():  # type: ignore[attr-defined]
            if request.status != RequestStatus.RUNNING:
                _rehash(request)
        return bool(super().reset_prefix_cache(*args, **kwargs))  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._midstream_quarantine.leaving(request.request_id)
        self._fill(request)
        self._midstream_shallow.left(request.request_id, request.num_tokens)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        _rehash(request)

    def _keeping(self, output: Any) -> Keeping:
        keeping = Keeping()
        rows = self._midstream_rows
        for data in output.scheduled_new_reqs:
            if (captures := self._midstream_capturing.get(data.req_id)) is not None:
                keeping.serve += rows.serve(
                    data.req_id,
                    captures,
                    _row_hashes(self.requests[data.req_id]),  # type: ignore[attr-defined]
                    data.num_computed_tokens,
                )
        filling = self._midstream_filling
        scheduled = output.num_scheduled_tokens
        for request_id in [name for name in scheduled if name in filling]:
            request = self.requests[request_id]  # type: ignore[attr-defined]
            captures = self._midstream_capturing.get(request_id)
            stop = request.num_computed_tokens  # already includes the tokens of this step
            if captures is not None:
                start = stop - scheduled[request_id]
                keeping.keep += rows.keep(request_id, captures, _row_hashes(request), start, stop)
            if stop >= request.num_tokens:  # a preempted request computes more than its prompt
                filling.discard(request_id)
        keeping.drop = rows.dropped()
        return keeping

    def _capped(self, original: Any, block: int) -> Any:
        """Return `get_computed_blocks` with limits on the blocks that a request may reuse. `block`:
        tokens of a hash.

        A request that captures reuses cached blocks only as far as their captured rows are kept. A
        sweep cell reuses the kept blocks of its base, the sweep's unpatched prompt, up to the first
        position that the cell edits. A request whose forward may begin above the first layer reuses
        only blocks before the first position that it edits, which other requests computed. Blocks
        that it filled itself, before it was preempted, may lack the lower layers. A shallow request
        reuses blocks of its depth, or those of requests that computed all layers.
        """

        def get_computed_blocks(request: Any, max_cache_hit_length: int | None = None) -> Any:
            captures = self._midstream_capturing.get(request.request_id)
            base = self._midstream_bases.get(request.request_id, RepeatedPrompt("", 0, 0))
            limits = [] if max_cache_hit_length is None else [max_cache_hit_length]
            if captures is None:  # a capture would lack the rows of skipped positions
                limit = min([base.touched, *limits])
                result = self._midstream_blocks.find(base.run, request, limit)
                if result is not None:
                    return *result, 0
            if base.layer:
                limits.append(base.touched)
            if captures is not None:
                # A preempted request keeps its recorded rows, and recomputes the others.
                limits.append(
                    captures.lowest_captured
                    if request.num_preemptions
                    else self._midstream_rows.reach(captures, _row_hashes(request))
                )
            if not (spec := _spec(request)) or not spec.depth:
                return original(_Shortened(request, min(limits)) if limits else request)
            # Blocks of whole forwards have all that a shallow request reads.
            limit = min(limits, default=request.num_tokens)
            whole = _row_hashes(request)
            found = original(_Shortened(request, limit, whole))
            blocks = found[1] // block
            own = request.block_hashes[blocks:]
            return original(_Shortened(request, limit, whole[:blocks] + own)) if own else found

        return get_computed_blocks


class _Shortened:
    """A request as vLLM's search for cached blocks sees it, which may find at most `limit` tokens.

    vLLM takes that limit as an argument only from 0.33 on. Before, it is always all tokens but the
    last, so here the request has fewer.
    """

    def __init__(self, request: Any, limit: int, hashes: list[Any] | None = None) -> None:
        """`hashes`: of its blocks, if not its own."""
        self._request = request
        self.num_tokens = min(request.num_tokens, limit + 1)
        if hashes is not None:
            self.block_hashes = hashes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _Whole:
    """A shallow request as vLLM hashes the blocks of one that computes all layers."""

    def __init__(self, request: Any) -> None:
        self._request = request
        self.block_hashes = list[Any]()
        spec = _spec(request)
        assert spec is not None, "a shallow request has one"
        setattr(self, _SPEC, replace(spec, depth=0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _row_hashes(request: Any) -> list[Any]:
    """Return the hashes of a request's blocks, for a shallow one those as if it computed all
    layers: a row is the same in both.
    """
    spec = _spec(request)
    hashes: list[Any] = request.block_hashes
    if spec is None or not spec.depth or not hashes:
        return hashes
    known: list[Any] | None = getattr(request, _WHOLE_HASHES, None)
    if known is None or len(known) != len(hashes):
        whole = _Whole(request)
        type(request).update_block_hashes(whole)
        known = whole.block_hashes
        setattr(request, _WHOLE_HASHES, known)
    return known


class MidstreamScheduler(_Midstream, Scheduler):
    """Scheduler of engines without asynchronous scheduling."""


class MidstreamAsyncScheduler(_Midstream, AsyncScheduler):
    """Scheduler of engines with asynchronous scheduling."""


def _accept_ends() -> None:
    """Add `EngineCore.midstream_end`, which the worker calls and which makes no call to ranks."""
    # imported where a scheduler is created: ranks import this module too, and do not need it
    from vllm.v1.engine.core import EngineCore

    def midstream_end(self: Any, ends: list[RequestEnd]) -> None:
        self.scheduler.midstream_end([(key, num_tokens) for key, num_tokens in ends])

    # A call to all ranks would hold up the engine core until each has answered. Abort messages with
    # ids that we make up would not do either: the core handles each of them twice.
    EngineCore.midstream_end = midstream_end


def _rehash(request: Any, *, always: bool = False) -> None:
    """Recompute the block hashes of a steered request for the current epoch; the request must hold
    no blocks of the KV cache.

    `always`: recompute them for any request, even one that holds blocks.
    """
    spec = _spec(request)
    if (always or (spec is not None and spec.digest)) and request.block_hashes:
        request.block_hashes.clear()
        setattr(request, _WHOLE_HASHES, None)
        request.update_block_hashes()


def _install_block_keys() -> None:
    original = kv_cache_utils.generate_block_hash_extra_keys

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> Any:
        """Return the extra keys of a block's hash: blocks from the first affected position on have
        the interventions' digest; earlier ones stay shared.
        """
        keys, next_mm_idx = original(request, start_token_idx, end_token_idx, start_mm_idx)
        spec = _spec(request)
        if spec is not None and spec.digest and end_token_idx > spec.first_affected:
            if not hasattr(request, _HASHED_IN):
                setattr(request, _HASHED_IN, _epoch)
            # A longer prompt with the same beginning (the next turn of a chat) is edited at other
            # positions from here on.
            prompt_tokens = (
                spec.prompt_tokens if spec.by_prompt and end_token_idx >= spec.prompt_tokens else 0
            )
            keys = (*(keys or ()), (_KEY, spec.digest, prompt_tokens, _epoch))
        if spec is not None and spec.depth:
            keys = (*(keys or ()), (_KEY, spec.depth))
        if owner := private(request, end_token_idx):
            keys = (*(keys or ()), (_KEY, owner))
        return keys, next_mm_idx

    # vLLM looks this name up at each call, so replacing it here suffices.
    kv_cache_utils.generate_block_hash_extra_keys = generate_block_hash_extra_keys


_install_block_keys()
