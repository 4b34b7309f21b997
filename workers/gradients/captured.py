"""Gradient rows of a prompt: from a stored scalar to a capture that the writer takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ...schemas.artifacts.saes import StoredSae
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.scalars import StoredScalar
from ...schemas.requests.specs import StoredCapture
from ...schemas.requests.steering import GlobalSteering
from ..engine.protocol import EngineRequest
from ..engine.ranks.rank_spec import rank_spec
from ..runner.files.finished_rows import Columns, FinishedCapture
from ..runner.readings.sae import Autoencoder
from .points import Points, Site
from .scalars import Scalar, feature_activation, gradient_rows, logit, loss, probe_score


@dataclass(frozen=True)
class Rows:
    """The gradient rows of one capture of a request."""

    capture: StoredCapture
    positions: list[int]
    dtype: str
    rows: dict[tuple[str, int], bytes] = field(default_factory=dict)  # `[positions, stored size]`
    # how many rows overflow the stored dtype
    non_finite: dict[tuple[str, int], int] = field(default_factory=dict)

    def finished(self, ask: EngineRequest, info: ModelInfo, worker: str) -> FinishedCapture:
        """Return the capture for the writer."""
        capture, spec = self.capture, rank_spec(ask, GlobalSteering())
        assert spec is not None, "the request has captures"
        return FinishedCapture(
            spec=spec,
            capture=capture,
            sites={str(hook): layers for hook, layers in capture.sites.items()},
            hidden_size=capture.stored_size(info.hidden_size),
            dtype=self.dtype,
            positions=self.positions,
            token_ids=[ask.token_ids[position] for position in self.positions],
            worker=worker,
            rank=0,
            pp=0,
            stages=1,
            rows=lambda hook, layer: [memoryview(self.rows[hook, layer])],
            num_layers=info.num_layers,
            identity=info.identity,
            non_finite=self.non_finite,
            columns=_columns(capture),
        )


def _columns(capture: StoredCapture) -> Columns | None:
    return None if capture.row is None else Columns(capture.row, 0, capture.row.size)


def sites_of(captures: list[StoredCapture]) -> list[Site]:
    """Return the sites of all of these captures, each once."""
    every = (capture.sites.items() for capture in captures)
    return list(
        dict.fromkeys((hook, at) for sites in every for hook, layers in sites for at in layers)
    )


def rows_of(
    points: Points,
    ask: EngineRequest,
    tensors: Mapping[str, torch.Tensor],
    load_sae: Callable[[StoredSae], Autoencoder],
    check: Callable[[], None],
) -> list[Rows]:
    """Return the gradient rows of each capture of a request; captures with the same scalar share a
    backward pass. `tensors`: those of probes, by name.

    Raises NonFiniteGradient, UnsupportedArchitectureError, and SaeError for changed files.
    """
    tokens, result = list(ask.token_ids), []
    gradients: list[tuple[StoredScalar, dict[Site, torch.Tensor]]] = []
    for capture in ask.captures:
        stored = capture.gradient
        assert stored is not None, "a gradient job captures gradients only"
        check()
        known = next((of for scalar, of in gradients if scalar == stored), None)
        if known is None:
            sites = sites_of([other for other in ask.captures if other.gradient == stored])
            scalar = scalar_of(stored, tokens, tensors, load_sae)
            known = gradient_rows(points, tokens, scalar, sites).rows
            gradients.append((stored, known))
        positions = list(capture.select(0, len(tokens), len(tokens)))
        dtype = points.model.dtype if capture.dtype == "model" else getattr(torch, capture.dtype)
        columns = _columns(capture)
        chosen = [slice(None)] if columns is None else columns.chosen(capture.heads)
        rows = Rows(capture, positions, str(dtype).removeprefix("torch."))
        for site in sites_of([capture]):
            whole = known[site][positions]
            kept = torch.cat([whole[:, part] for part in chosen], 1).to(dtype).cpu()
            rows.rows[site] = kept.contiguous().view(torch.uint8).numpy().tobytes()
            rows.non_finite[site] = int((~kept.isfinite()).any(1).sum())
        result.append(rows)
    return result


def scalar_of(
    stored: StoredScalar,
    tokens: list[int],
    tensors: Mapping[str, torch.Tensor],
    load_sae: Callable[[StoredSae], Autoencoder],
) -> Scalar:
    """Return the scalar that `gradient_rows` takes. Raises SaeError for changed files."""
    if stored.kind == "logit":
        return logit(stored.token, stored.foil)
    if stored.kind == "loss":
        return loss(tokens, stored.positions)
    if stored.kind == "probe":
        assert stored.probe is not None
        content = stored.probe.content
        weight, bias = (tensors[name][stored.label] for name in content.tensors)
        return probe_score((content.hook, content.layer), weight, float(bias), stored.positions)
    assert stored.sae is not None
    site: Site = (stored.sae.hook, stored.sae.layer)
    return feature_activation(site, load_sae(stored.sae), stored.feature, stored.positions)
