"""Observes the certification run's requests on a rank while they run."""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_pp_group

from ....schemas.jobs.receipts import Receipt
from ..files.finished_rows import FinishedCapture, Outcome
from ..readings.readings import rows_of
from .laws import RowsAt

if TYPE_CHECKING:
    from ..base.engine_step import StepView
    from ..hooks.architectures import Adapter
    from ..plane.data_plane import DataPlane


class KeptRows:
    """Keeps captured rows and receipts in place of consumers and outbox. Called from writer
    threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # (request, hook, layer) → position → row
        self.rows: dict[tuple[int, str, int], dict[int, torch.Tensor]] = {}
        self.ended: dict[int, str] = {}  # request → why it failed; empty: it succeeded

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]:
        for capture in captures:
            for hook, layers in capture.sites.items():
                for layer in layers:
                    held = rows_of(capture, hook, layer)
                    with self._lock:
                        self.rows.setdefault((capture.spec.request, hook, layer), {}).update(
                            zip(capture.positions, held, strict=True)
                        )
        return [Outcome()] * len(captures)

    def receipt(self, receipt: Receipt) -> None:
        with self._lock:
            self.ended[receipt.request] = (
                "" if receipt.status == "ok" else receipt.message or receipt.status
            )

    def of(self, request: int, positions: Sequence[int]) -> RowsAt:
        """Return a function (hook, layer) → float32 rows of a request at these positions.

        The function raises KeyError for a row that was not captured.
        """
        return lambda hook, layer: torch.stack(
            [self.rows[request, hook, layer][position] for position in positions]
        ).float()


class ObservedRequests:
    """Rows, logits and final hidden states of the requests, from now until `close`."""

    def __init__(
        self,
        plane: "DataPlane",
        worker: Any,
        adapter: "Adapter",
        layers: Iterable[int],
        *,
        traced: bool,
    ) -> None:
        """`layers`: the layers of this rank's stage."""
        self._plane = plane
        self._runner = worker.model_runner
        self._adapter = adapter
        self._traced = traced
        self._model: Any = worker.get_model()
        self._layers = sorted(layers)
        self.skipped = ""  # why `aux` is empty
        # layer → the residual stream after it, as vLLM reads it for EAGLE-3
        self.aux: dict[int, torch.Tensor] = {}
        self.most = 0  # most requests in one step
        # the watched request and its last position, if it is alone in the step
        self._alone: tuple[int, int] | None = None
        self._watched = -1  # number of the watched request; -1: none
        # (request, position) → the logits that vLLM's sampler got
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        # (request, position) → the final hidden state of these logits
        self.final: dict[tuple[int, int], torch.Tensor] = {}
        self.kept = KeptRows()
        plane.divert(self.kept)
        plan = plane.plan
        compute_logits = self._model.compute_logits

        def observed_plan(view: "StepView") -> None:
            self.most = max(self.most, len(view.requests))
            only = view.requests[0] if len(view.requests) == 1 and self._watched >= 0 else None
            self._alone = (
                (self._watched, only.first_position + only.num_rows - 1)
                if only is not None
                else None
            )
            plan(view)

        # Not log-probabilities: vLLM compiles a function when they are first asked for (4 s).
        def observed_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            state = next(iter((*args, *kwargs.values())))
            if self._alone is not None and len(state) == 1:
                # on every rank, including those that get no logits
                self.final[self._alone] = state.detach().clone()
                if logits is not None:
                    self.logits[self._alone] = logits.detach().float().cpu()
            return logits

        plane.plan = observed_plan  # type: ignore[method-assign]
        self._restore = compute_logits
        self._model.compute_logits = observed_logits

    def watch(self, request: int) -> None:
        """Keep the logits of `request`, which must be the only one running.

        For request 0, also keep the residual stream that vLLM reads after each layer for EAGLE-3.
        """
        self._watched = request
        if request:
            return
        if why := self._why_no_aux():
            self.skipped = why
            return
        try:
            self._model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in self._layers))
        except Exception as error:
            self.skipped = f"the model rejects these layers: {error}"
            return
        forward = self._model.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if not isinstance(output, tuple):
                return output
            hidden, states = output
            if not self.aux:
                self.aux = {
                    layer: state.detach().cpu().clone()
                    for layer, state in zip(self._layers, states, strict=True)
                }
            return hidden

        self._model.forward = watched

    def _why_no_aux(self) -> str:
        """Return why the law "EAGLE-3 auxiliary states" cannot be checked; empty if it can."""
        if self._traced:
            return "the forward pass is compiled"
        if not hasattr(self._model, "set_aux_hidden_state_layers"):
            return "the model does not offer them"
        if self._adapter.variant.backend:
            return "vLLM's Transformers backend cannot remove the hooks that it installs for them"
        if not get_pp_group().is_last_rank or get_pp_group().world_size > 1:
            return "the engine has several pipeline stages"
        return (
            "the drafter already uses them"
            if getattr(self._runner, "use_aux_hidden_state_outputs", False)
            else ""
        )

    def unwatch(self) -> None:
        self._watched = -1
        if "forward" in self._model.__dict__ and not self.skipped:
            del self._model.forward
            self._model.set_aux_hidden_state_layers(())

    def close(self) -> None:
        """Stop observing, and reset the plane's rows, receipts and counters of the run."""
        self.unwatch()
        self._model.compute_logits = self._restore
        del self._plane.plan
        self._plane.divert(None)
