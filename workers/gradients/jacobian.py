"""Fits Jacobian lenses: the mean Jacobian of the final residual by the residual behind each layer,
over the prompts of a corpus, exact or from some output dimensions of each prompt.

Definition and conventions are those of Gurnee et al. 2026 ("Verbalizable Representations Form a
Global Workspace in Language Models") and of the reference implementation: every prompt counts the
same, effects on all later target positions are summed, and source positions are averaged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...schemas.artifacts.jacobian_lenses import JacobianFit, JacobianRecord, StoredLensFit
from ...storage.formats.jacobian_files import Matrix, write
from ..engine.proof.reference import free_bytes
from .estimates import at_once
from .loading import GIB, free_on, refused
from .memory import Footprint
from .points import Points, Site

#: Random vectors on which the error of a sketch is measured; each costs every prompt one more
#: vector-Jacobian product.
HELD_OUT = 8
#: Vectors of one backward pass: copies of the prompt that the graph holds.
BATCH = 8


def fit_memory(layers: int, width: int) -> int:
    """Return the bytes of host memory of a fit, which do not depend on the corpus: a float32 sum
    `[width, width]` for each layer, and one more for the mean of a layer.

    The graph of one prompt comes on top: activations of BATCH copies of at most `max_tokens`.
    """
    return 4 * width * ((layers + 1) * width + (layers + 1) * HELD_OUT)


def fit_jacobian_lens(
    points: Points,
    prompts: Iterable[Sequence[int]],
    layers: Sequence[int],
    fit: JacobianFit,
    check: Callable[[], None] = lambda: None,
    batch: int = BATCH,
) -> tuple[dict[int, torch.Tensor], JacobianRecord]:
    """Return J of each of `layers`, float32 `[hidden, hidden]` on the host, and the fit's record.

    `prompts`: token ids, read once and in order. `layers`: below the last. `check` is called before
    every backward pass; what it raises ends the fit. Prompt n is differentiated by the dimensions
    n · rank, n · rank + 1, … of a random order, so every row of J is a mean over an equal share of
    the prompts; without `rank`, by all dimensions. Equal arguments give equal results.

    Raises ValueError when a dimension has no prompt.
    """
    wanted = sorted({*layers})
    if not wanted or wanted[0] < 0 or wanted[-1] >= points.num_layers - 1:
        raise ValueError(f"layers are {list(layers)}; valid: some of 0 to {points.num_layers - 2}")
    width = points.hidden_size
    rank = width if fit.rank is None else min(fit.rank, width)
    random = torch.Generator().manual_seed(fit.seed)
    order = torch.randperm(width, generator=random)
    held_out = torch.randn(HELD_OUT if rank < width else 0, width, generator=random)
    tally = _Tally(wanted, width, held_out)
    done = short = 0
    for tokens in prompts:
        ids = list(tokens)[: fit.max_tokens]
        if len(ids) <= fit.skip_first + 1:
            short += 1
            continue
        rows = order[(done * rank + torch.arange(rank)) % width]
        places = slice(fit.skip_first, len(ids) - 1)
        for vectors, means in _products(points, ids, places, tally, rows, batch, check):
            tally.add(vectors, means)
        done += 1
    if lacking := int((tally.counts[:width] == 0).sum()):
        raise ValueError(
            f"{lacking} of {width} dimensions have no gradient from {done} prompts ({short} are "
            f"too short, {tally.not_finite} gradients are not finite): rank {rank} needs at least "
            f"{-(-width // rank)} prompts of more than {fit.skip_first + 1} tokens"
        )
    jacobians, errors = tally.means()
    return jacobians, JacobianRecord(
        method="exact" if rank == width else "sketched",
        prompts=done,
        rank=rank,
        seed=fit.seed,
        skip_first=fit.skip_first,
        max_tokens=fit.max_tokens,
        short=short,
        not_finite=tally.not_finite,
        errors=errors,
    )


def fit_to_folder(
    points: Points,
    stored: StoredLensFit,
    folder: Path,
    check: Callable[[], None] = lambda: None,
    report: Callable[[int], None] = lambda done: None,
) -> JacobianRecord:
    """Fit a lens and write it to `folder`, with the model's output matrix in its own dtype; the
    folder can be registered. Returns the record of the fit. `report` is called before each prompt,
    with the number of those before it.

    Raises what `fit_jacobian_lens` raises, OSError, and MidstreamError("gradients_refused") with
    the figures where memory is lacking.
    """
    needed, free = fit_memory(len(stored.layers), points.hidden_size), free_bytes()
    if needed > free:
        raise refused(
            f"the fit of {len(stored.layers)} layers takes {needed / GIB:.1f} GiB of host memory, "
            f"and {free / GIB:.1f} GiB are free: give fewer layers"
        )

    def prompts() -> Iterator[list[int]]:
        for number, tokens in enumerate(stored.prompts):
            report(number)
            yield tokens

    longest = min(max(map(len, stored.prompts)), stored.fit.max_tokens)
    sites: list[Site] = [("post_block", layer) for layer in stored.layers]
    batch = min(BATCH, at_once(Footprint(points), longest, sites, free_on(points)))
    jacobians, record = fit_jacobian_lens(
        points, prompts(), stored.layers, stored.fit, check, batch
    )
    head = points.model.get_output_embeddings().weight.detach().cpu()
    dtype = str(head.dtype).removeprefix("torch.")
    if dtype == "bfloat16":  # numpy has none
        head = head.view(torch.uint16)
    arrays = {layer: matrix.numpy() for layer, matrix in jacobians.items()}
    write(folder, arrays, record, Matrix(head.numpy(), dtype))
    return record


class _Tally:
    """Sums of vector-Jacobian products. Vector n is the unit vector of dimension n; those from
    `width` on are held out.
    """

    def __init__(self, layers: Sequence[int], width: int, held_out: torch.Tensor) -> None:
        self.layers, self.width, self.held_out = layers, width, held_out
        self.sums = {layer: torch.zeros(width + len(held_out), width) for layer in layers}
        self.counts = torch.zeros(width + len(held_out))
        self.not_finite = 0

    def vectors(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the vectors with these numbers, float32 `[numbers, width]`."""
        result = torch.zeros(len(numbers), self.width)
        unit = numbers < self.width
        result[unit.nonzero()[:, 0], numbers[unit]] = 1
        result[~unit] = self.held_out[numbers[~unit] - self.width]
        return result

    def add(self, numbers: torch.Tensor, means: Sequence[torch.Tensor]) -> None:
        """Add one prompt's products `[numbers, width]` of each layer, without vectors whose
        products are not finite at every layer.
        """
        finite = torch.stack([mean.isfinite().all(dim=1) for mean in means]).all(dim=0)
        for layer, mean in zip(self.layers, means, strict=True):
            self.sums[layer].index_add_(0, numbers[finite], mean[finite])
        self.counts.index_add_(0, numbers[finite], torch.ones(int(finite.sum())))
        self.not_finite += int((~finite).sum())

    def means(self) -> tuple[dict[int, torch.Tensor], list[float]]:
        """Return J and the relative error of each layer. Frees the sums."""
        jacobians: dict[int, torch.Tensor] = {}
        errors = []
        for layer in self.layers:
            every = self.sums.pop(layer).div_(self.counts[:, None])
            jacobians[layer], exact = every[: self.width], every[self.width :]
            if len(exact):
                wrong = self.held_out @ jacobians[layer] - exact
                errors.append(float(wrong.norm() / exact.norm()))
        return jacobians, errors


def _products(
    points: Points,
    ids: list[int],
    places: slice,
    tally: _Tally,
    rows: torch.Tensor,
    batch: int,
    check: Callable[[], None],
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield vectors' numbers and, for each layer, their products with one prompt's Jacobian,
    `[numbers, hidden]` on the host: gradients by the layer's rows of the sum over target places,
    averaged over source places.
    """
    held_out = tally.width + torch.arange(len(tally.held_out))
    numbers = torch.cat([rows, held_out])
    batch = min(batch, len(numbers))
    check()
    with _graph(points, ids, tally.layers, batch) as (target, sources):
        for start in range(0, len(numbers), batch):
            check()
            chunk = numbers[start : start + batch]
            cotangent = torch.zeros_like(target)
            cotangent[: len(chunk), places] = tally.vectors(chunk)[:, None].to(cotangent)
            grads = torch.autograd.grad(
                target, sources, cotangent, retain_graph=start + batch < len(numbers)
            )
            yield (
                chunk,
                [grad[: len(chunk), places].float().mean(dim=1).cpu() for grad in grads],
            )


@contextmanager
def _graph(
    points: Points, ids: list[int], layers: Sequence[int], batch: int
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield the outputs of the last layer and of `layers`, `[batch, tokens, hidden]` each, of one
    forward pass of `batch` copies; the graph begins at the first of `layers`, without parameters.
    """
    seen: dict[int, torch.Tensor] = {}
    model = points.model

    def hook(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, given: Any, output: Any) -> None:
            hidden = output if torch.is_tensor(output) else output[0]
            seen[layer] = hidden if hidden.requires_grad else hidden.requires_grad_(True)

        return keep

    places = [*layers, points.num_layers - 1]
    handles = [points.layers[layer].register_forward_hook(hook(layer)) for layer in places]
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            tokens = torch.tensor([ids], device=points.device)
            model.base_model(input_ids=tokens.expand(batch, -1), use_cache=False)
            yield seen[places[-1]], [seen[layer] for layer in layers]
    finally:
        seen.clear()
        for handle in handles:
            handle.remove()
        for parameter in frozen:
            parameter.requires_grad_(True)
