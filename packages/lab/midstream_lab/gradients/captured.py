"""Gradient rows of a prompt: from a stored scalar to a capture that the writer takes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from midstream.schemas.artifacts.saes import StoredSae
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.prompts.sites import hook_layers
from midstream.schemas.requests.scalars import StoredScalar
from midstream.schemas.requests.specs import StoredCapture
from midstream.workers.engine.protocol import EngineRequest
from midstream.workers.engine.ranks.rank_spec import rank_spec
from midstream.workers.runner.files.finished_rows import BankColumns, FinishedCapture
from midstream.workers.runner.readings.sae import Autoencoder

from .pairs import loss, require_finite
from .points import Points, RowsBySite, SiteKey
from .protocol import StopCheck


def sites_of(captures: Sequence[StoredCapture]) -> list[SiteKey]:
    """Return the sites of all of these captures, each once."""
    return list(dict.fromkeys(site for capture in captures for site in hook_layers(capture.sites)))


def finished(
    points: Points,
    ask: EngineRequest,
    info: ModelInfo,
    worker: str,
    tensors: Mapping[str, torch.Tensor],
    load_sae: Callable[[StoredSae], Autoencoder],
    check: StopCheck,
) -> list[FinishedCapture]:
    """Return the captures of a request, with their gradient rows; those with the same scalar share
    a backward pass. `tensors`: those of probes, by name.

    Raises NonFiniteGradient, UnsupportedArchitectureError, and what `load_sae` raises.
    """
    tokens = list(ask.token_ids)
    spec = rank_spec(ask)
    result = []
    assert spec is not None, "the request has captures"
    gradients: list[tuple[StoredScalar, RowsBySite]] = []
    for capture in ask.captures:
        stored = capture.gradient
        assert stored is not None, "a gradient job captures gradients only"
        check()
        if (known := next((of for scalar, of in gradients if scalar == stored), None)) is None:
            sites = sites_of([other for other in ask.captures if other.gradient == stored])
            scalar = scalar_of(stored, tokens, tensors, load_sae)
            known = gradient_rows(points, tokens, scalar, sites)[1]
            gradients.append((stored, known))
        positions = list(capture.select(0, len(tokens), len(tokens)))
        dtype = points.model.dtype if capture.dtype == "model" else getattr(torch, capture.dtype)
        columns = None if capture.row is None else BankColumns(capture.row, 0, capture.row.size)
        parts = [slice(None)] if columns is None else columns.chosen(capture.heads)
        buffers: dict[tuple[str, int], memoryview] = {}
        overflowed: dict[tuple[str, int], int] = {}
        for site in sites_of([capture]):
            whole = known[site][positions]
            kept = torch.cat([whole[:, part] for part in parts], 1).to(dtype).cpu().contiguous()
            buffers[site] = memoryview(kept.view(torch.uint8).numpy().tobytes())
            overflowed[site] = int((~kept.isfinite()).any(1).sum())
        result.append(
            FinishedCapture(
                spec=spec,
                capture=capture,
                sites={str(hook): layers for hook, layers in capture.sites.items()},
                hidden_size=capture.stored_size(info.hidden_size),
                dtype=str(dtype).removeprefix("torch."),
                positions=positions,
                token_ids=[tokens[position] for position in positions],
                worker=worker,
                rank=0,
                pp=0,
                stages=1,
                rows=partial(_rows, buffers),
                num_layers=info.num_layers,
                identity=info.identity,
                non_finite=overflowed,
                columns=columns,
            )
        )
    return result


def _rows(buffers: Mapping[tuple[str, int], memoryview], hook: str, layer: int) -> list[memoryview]:
    return [buffers[hook, layer]]


class Scalar(NamedTuple):
    """A differentiable number of one prompt. `compute` receives the logits at `positions`, by
    default the last, float64 `[positions, vocabulary]`, and the rows of `site`, `[tokens, width]`.
    """

    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    positions: Sequence[int] = ()
    site: SiteKey | None = None


def scalar_of(
    stored: StoredScalar,
    tokens: Sequence[int],
    tensors: Mapping[str, torch.Tensor],
    load_sae: Callable[[StoredSae], Autoencoder],
) -> Scalar:
    """Return a scalar, see `schemas.requests.scalars.ScalarSpec`. Raises what `load_sae` raises."""
    at = stored.positions
    if stored.kind == "logit":
        token = stored.token
        foil = stored.foil
        if foil is None:
            return Scalar(lambda logits, _: logits[-1, token])
        return Scalar(lambda logits, _: logits[-1, token] - logits[-1, foil])
    if stored.kind == "loss":
        targets = [tokens[position] for position in at]
        return Scalar(lambda logits, _: loss(logits, targets), [position - 1 for position in at])
    if stored.kind == "probe":
        assert stored.probe is not None
        content = stored.probe.content
        label = stored.label
        weight, bias = (tensors[name][label].double() for name in content.tensors)

        def score(_: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return (rows[at].double() @ weight.to(rows.device)).sum() + float(bias) * len(at)

        return Scalar(score, site=(content.hook, content.layer))
    assert stored.sae is not None
    sae = load_sae(stored.sae)
    feature = stored.feature

    def activation(_: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return sae.to(rows.device).encode(rows[at].float())[:, feature].double().sum()

    return Scalar(activation, site=(stored.sae.hook, stored.sae.layer))


def gradient_rows(
    points: Points, tokens: Sequence[int], scalar: Scalar, sites: Sequence[SiteKey]
) -> tuple[float, RowsBySite]:
    """Return a scalar's value, and site → d scalar / d row, `[tokens, width]` in the model's dtype.

    Raises UnsupportedArchitectureError for a hook point that the model lacks, and
    NonFiniteGradient.
    """
    read = {*sites} if scalar.site is None else {*sites, scalar.site}
    # the encoders of autoencoders write to their products in place
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        run = points.run(points.batch([tokens]), read, keep=scalar.positions, grad=True)
        rows = (
            run.view(scalar.site, run.raw[scalar.site])[0]
            if scalar.site is not None
            else torch.empty(0)
        )
        value = scalar.compute(run.logits[0].double(), rows)
        gradients = run.gradients(value)
    require_finite({("", -1): value.detach()} | gradients)
    return value.item(), {site: gradients[site][0] for site in sites}
