"""CUDA graphs of several families for each batch shape: for steps with work at any site, at sites
of the residual stream alone, and at none (`kernels.ops`).

All are captured from the same compiled artefact, so they compute the same bits. vLLM keys its
graphs by a descriptor of the batch; here the descriptor also has the graph's family.
`docs/decisions/0015-graph-families.md` has the reasons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, get_forward_context
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from ....kernels import WHOLE, family, in_family


@dataclass(frozen=True)
class GraphKey(BatchDescriptor):
    """Key of a graph in the v1 runner, and of a piecewise graph in both."""

    family: int = WHOLE


@dataclass(frozen=True)
class Execution(BatchExecutionDescriptor):
    """Key of a graph in the v2 runner."""

    family: int = WHOLE


def _of_family(descriptor: Any, kind: type, chosen: int) -> Any:
    """Return a descriptor, vLLM's or already of `kind`, as the key of one family."""
    if isinstance(descriptor, kind):
        return replace(descriptor, family=chosen)  # type: ignore[type-var]
    return kind(
        **{field.name: getattr(descriptor, field.name) for field in fields(descriptor)},
        family=chosen,
    )


class FamilyDispatcher(CudagraphDispatcher):
    """The v1 runner's dispatcher with keys for each family; `dispatch` returns the key of the next
    forward's family, which `in_family` has set.
    """

    families: Sequence[int]

    def _create_padded_batch_descriptor(self, *args: Any, **kwargs: Any) -> BatchDescriptor:
        return _of_family(
            super()._create_padded_batch_descriptor(*args, **kwargs), GraphKey, family()
        )

    def add_cudagraph_key(
        self, runtime_mode: CUDAGraphMode, batch_descriptor: BatchDescriptor
    ) -> None:
        for each in self.families:
            super().add_cudagraph_key(runtime_mode, _of_family(batch_descriptor, GraphKey, each))

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Return the descriptors to capture, largest first like vLLM's.

        The keys are a set, whose order differs between processes, so `family` orders equal ones.
        """
        return [
            (
                mode,
                sorted(
                    descriptors,
                    key=lambda item: (-item.num_tokens, -item.num_active_loras, item.family),
                ),
            )
            for mode, descriptors in super().get_capture_descs()
        ]


class _Capturing(CudaGraphManager):
    """Base class put after the model's manager, whose `capture` calls this `capture` with the
    function that creates the forwards.
    """

    def capture(
        self,
        create_forward_fn: Callable[..., Callable[[CUDAGraphMode], None]],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        def of_family(descriptor: Any, *more: Any, **named: Any) -> Callable[[CUDAGraphMode], None]:
            forward = create_forward_fn(descriptor, *more, **named)

            def run(mode: CUDAGraphMode) -> None:
                with in_family(descriptor.family):
                    forward(mode)

            return run

        super().capture(of_family, *args, **kwargs)


class _Dispatching(CudaGraphManager):
    """Mix-in put before the model's manager."""

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        result = super().dispatch(*args, **kwargs)
        return (
            result
            if result.cg_mode == CUDAGraphMode.NONE
            else _of_family(result, Execution, family())
        )

    def run_pw_graph(self, *args: Any, **kwargs: Any) -> Any:
        """Set the family in the forward context's descriptor, by which the graphs of the pieces are
        found at capture and at replay.
        """
        context = get_forward_context()
        context.batch_descriptor = _of_family(context.batch_descriptor, GraphKey, family())
        return super().run_pw_graph(*args, **kwargs)


def dispatch_by_family(dispatcher: CudagraphDispatcher, families: Sequence[int]) -> None:
    """Give the v1 runner's dispatcher these families, before its keys are made.

    They are captured in this order, which must be the same on all ranks: custom all-reduce
    exchanges buffer addresses in that order.
    """
    dispatcher.__class__ = FamilyDispatcher
    dispatcher.families = families


def capture_families(manager: CudaGraphManager, families: Sequence[int]) -> None:
    """Give the v2 runner's manager these families, before it captures them in this order."""
    base = type(manager)
    # vLLM made the instance, so that it gets a subclass, as the runner does: no file changes.
    manager.__class__ = type(f"Midstream{base.__name__}", (_Dispatching, base, _Capturing), {})
    for mode, descriptors in manager._capture_descs.items():
        manager._capture_descs[mode] = [
            _of_family(descriptor, Execution, each)
            for descriptor in descriptors
            for each in families
        ]
