"""Adapters of vLLM's v1 and v2 model runners. No other module knows a runner's attributes.

Both adapters are mix-ins of the platform's runner class; see `docs/decisions/0002-data-plane.md`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....kernels import WHOLE, in_family
from ..base.config import PlaneConfig, plane_config
from ..base.engine_step import NewRequest, StepView
from ..base.packed_spec import packed_spec, unpack
from ..probes.probe_news import NEWS
from ..support import build_errors
from .graph_families import capture_families, dispatch_by_family
from .quarantine import attach
from .scheduler import orders_of

if TYPE_CHECKING:
    from torch import nn

    from ..plane.data_plane import DataPlane


def _new_requests(scheduler_output: Any) -> list[NewRequest]:
    new = []
    for data in scheduler_output.scheduled_new_reqs:
        if (packed := packed_spec(data.sampling_params)) is not None:
            spec, unreadable = unpack(packed)
            max_tokens = data.sampling_params.max_tokens or 0
            new.append(
                NewRequest(
                    data.req_id,
                    spec,
                    data.num_computed_tokens,
                    max_tokens,
                    unreadable,
                    data.prompt_token_ids or (),
                )
            )
    return new


def _resumed(scheduler_output: Any) -> dict[str, int]:
    """Return preempted requests that resume → tokens served by the prefix cache.

    The v2 runner gets them as new requests instead.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if not cached.resumed_req_ids:
        return {}
    pairs = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return {req_id: computed for req_id, computed in pairs if req_id in cached.resumed_req_ids}


def _windows(scheduler_output: Any) -> Iterable[tuple[str, int, int]]:
    """Return (request, first position, count) of a step as the scheduler sends it to all ranks."""
    counts = scheduler_output.num_scheduled_tokens
    cached = scheduler_output.scheduled_cached_reqs
    new = [
        (data.req_id, data.num_computed_tokens, counts[data.req_id])
        for data in scheduler_output.scheduled_new_reqs
    ]
    running = zip(
        cached.req_ids,
        cached.num_computed_tokens,
        map(counts.__getitem__, cached.req_ids),
        strict=True,
    )
    return itertools.chain(new, running)


class _Adapter:
    """Calls of the data plane around a forward, which both runners share."""

    midstream: "DataPlane | None" = None

    @cached_property
    def _plane_config(self) -> PlaneConfig:
        return plane_config()

    @contextmanager
    def _step(self, scheduler_output: Any) -> Iterator[None]:
        """Begin a step, and after the block, which runs the forward, drain it."""
        config = self._plane_config
        with build_errors.kept_for_worker(config.spill_dir, config.boot):
            with self._begin(scheduler_output):
                yield
            self._drain()

    def _begin(self, scheduler_output: Any) -> AbstractContextManager[None]:
        """Begin a step; return the context in which it must run, with its graph family."""
        chosen = WHOLE
        if self.midstream is not None:
            preempted = len(scheduler_output.preempted_req_ids or ())
            orders = orders_of(scheduler_output)
            self.midstream.load = orders.load
            self.midstream.begin(
                new=_new_requests(scheduler_output),
                finished=orders.finished,
                preempted=preempted,
                keeping=orders.keeping,
                resumed=_resumed(scheduler_output),
                ends=orders.ends,
                waiting=orders.waiting,
                depth=orders.depth,
            )
            chosen = self.midstream.choose(_windows(scheduler_output))
        return in_family(chosen)

    def _drain(self) -> None:
        if self.midstream is not None:
            # on the last stage only: the hidden states from which logits are computed
            state = self.execute_model_state  # type: ignore[attr-defined]
            hidden = state.hidden_states if state is not None else None
            self.midstream.drain(hidden if isinstance(hidden, torch.Tensor) else None)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self.midstream is None:
            return output
        if (found := self.midstream.banks.found()) is not None:
            output = attach(output, found)
        if (news := self.midstream.probes.news()) is not None:
            output = attach(output, news, NEWS)
        return output

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        if self.midstream is not None:
            self.midstream.plan_nothing()
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]


class V1Adapter(_Adapter):
    """`vllm.v1.worker.gpu_model_runner.GPUModelRunner` and its CPU subclass."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        with self._step(scheduler_output):
            return super().execute_model(  # type: ignore[misc]
                scheduler_output, intermediate_tensors
            )

    def use_families(self, families: Sequence[int]) -> None:
        """Give vLLM's dispatcher these graph families; call this before its keys are made."""
        dispatch_by_family(self.cudagraph_dispatcher, families)  # type: ignore[attr-defined]

    def _warmup_and_capture(self, desc: Any, *args: Any, **kwargs: Any) -> None:
        with in_family(getattr(desc, "family", WHOLE)):  # without families, it is vLLM's own
            super()._warmup_and_capture(desc, *args, **kwargs)  # type: ignore[misc]

    def _prepare_inputs(
        self, scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any
    ) -> Any:
        prepared = super()._prepare_inputs(  # type: ignore[misc]
            scheduler_output, num_scheduled_tokens, *args, **kwargs
        )
        if self.midstream is not None:
            batch = self.input_batch  # type: ignore[attr-defined]
            many = len(num_scheduled_tokens)
            req_ids = batch.req_ids[:many]
            drafts = scheduler_output.scheduled_spec_decode_tokens
            self.midstream.plan(
                StepView(
                    req_ids,
                    num_scheduled_tokens,
                    batch.num_computed_tokens_cpu[:many],
                    [1 + len(drafts.get(req_id, ())) for req_id in req_ids],
                    self.input_ids.gpu,  # type: ignore[attr-defined]
                )
            )
        return prepared

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample without the random generators of requests whose sample is discarded, because
        their prompt continues in the next step.

        vLLM would rewind these generators afterwards, which it cannot do on a CPU.
        """
        batch = self.input_batch  # type: ignore[attr-defined]
        generators = batch.generators
        mask = self.discard_request_mask.np[: batch.num_reqs]  # type: ignore[attr-defined]
        discarded = mask.nonzero()[0].tolist()
        unused = {index: generators.pop(index) for index in discarded if index in generators}
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            generators.update(unused)

    def drafting_model(self) -> "nn.Module | None":
        """Return the drafting model, if any."""
        return getattr(getattr(self, "drafter", None), "model", None)

    def make_pipeline_buffers(
        self, model: Any, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the input buffers of a later pipeline stage: vLLM makes them in a dummy run, which
        eager engines on a CPU skip.
        """
        if self.intermediate_tensors is None:  # type: ignore[has-type]
            self.intermediate_tensors = model.make_empty_intermediate_tensors(
                batch_size=batch_size, dtype=dtype, device=device
            )


class V2Adapter(_Adapter):
    """`vllm.v1.worker.gpu.model_runner.GPUModelRunner` and its CPU subclass."""

    families: Sequence[int] = ()

    def execute_model(
        self,
        scheduler_output: Any,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with nullcontext() if dummy_run else self._step(scheduler_output):
            return super().execute_model(  # type: ignore[misc]
                scheduler_output, intermediate_tensors, dummy_run, *args, **kwargs
            )

    def use_families(self, families: Sequence[int]) -> None:
        """Give these families to the graphs' managers, which do not exist yet: see
        `initialize_kv_cache`.
        """
        self.families = families

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM's method, and give the graph manager that it makes its families. vLLM makes
        one manager for profiling and one to keep.
        """
        result = super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if self.families and self.cudagraph_manager is not None:  # type: ignore[attr-defined]
            capture_families(self.cudagraph_manager, self.families)  # type: ignore[attr-defined]
        return result

    # After all that vLLM prepares: gates and triggers wait for the last step, and meanwhile the
    # device has nothing to do.
    def prepare_attn(self, input_batch: Any) -> Any:
        prepared = super().prepare_attn(input_batch)  # type: ignore[misc]
        if self.midstream is not None:
            many = input_batch.num_reqs
            self.midstream.plan(
                StepView(
                    input_batch.req_ids,
                    input_batch.num_scheduled_tokens[:many],
                    input_batch.num_computed_tokens_np[:many],
                    np.diff(input_batch.cu_num_logits_np[: many + 1]),
                    input_batch.input_ids,
                )
            )
        return prepared

    def drafting_model(self) -> "nn.Module | None":
        """Return the drafting model, if any."""
        return self.get_draft_model()  # type: ignore[attr-defined]

    def make_pipeline_buffers(self, *_: Any) -> None:
        """Do nothing: the v2 runner makes these buffers."""
