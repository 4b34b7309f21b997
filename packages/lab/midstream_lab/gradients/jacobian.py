"""Fits Jacobian lenses: the mean Jacobian of the final residual by the residual behind each layer,
over the prompts of a corpus, exact or from some output dimensions of each prompt.

Definition and conventions are those of Gurnee et al. 2026 ("Verbalizable Representations Form a
Global Workspace in Language Models") and of the reference implementation: every prompt counts the
same, effects on all later target positions are summed, and source positions are averaged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.functional import one_hot

from midstream.schemas.artifacts.jacobian_lenses import JacobianFit, JacobianRecord, StoredLensFit
from midstream.storage.formats.lens_files import Matrix, write
from midstream.workers.engine.proof.reference import free_bytes

from ..records.fits import LensProgress
from .estimates import at_once
from .loading import GIB, Footprint, free_on, refused
from .points import ForwardPass, Points, SiteKey
from .protocol import StopCheck

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
    check: StopCheck = lambda: None,
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
    sites: list[SiteKey] = [("post_block", layer) for layer in (*wanted, points.num_layers - 1)]
    width = points.hidden_size
    rank = width if fit.rank is None else min(fit.rank, width)
    random = torch.Generator().manual_seed(fit.seed)
    order = torch.randperm(width, generator=random)
    # vector n is the unit vector of dimension n; those from `width` on are held out
    held_out = torch.randn(HELD_OUT if rank < width else 0, width, generator=random)
    count = width + len(held_out)
    sums = {layer: torch.zeros(count, width) for layer in wanted}
    counts = torch.zeros(count)
    done = short = not_finite = 0
    for tokens in prompts:
        ids = list(tokens)[: fit.max_tokens]
        if len(ids) <= fit.skip_first + 1:
            short += 1
            continue
        rows = order[(done * rank + torch.arange(rank)) % width]
        numbers = torch.cat([rows, torch.arange(width, count)])
        places = slice(fit.skip_first, len(ids) - 1)
        check()
        copies = min(batch, len(numbers))
        run = points.run(points.batch([ids] * copies), sites, grad=True)
        for chunk in numbers.split(copies):
            check()
            vectors = torch.stack(
                [held_out[n - width] if n >= width else one_hot(n, width).float() for n in chunk]
            )
            products = _products(run, sites, places, vectors)
            finite = torch.stack([product.isfinite().all(1) for product in products]).all(0)
            for layer, product in zip(wanted, products, strict=True):
                sums[layer].index_add_(0, chunk[finite], product[finite])
            counts += torch.bincount(chunk[finite], minlength=count)
            not_finite += int((~finite).sum())
        done += 1
        del run  # its graph, before the next prompt's
    if lacking := int((counts[:width] == 0).sum()):
        raise ValueError(
            f"{lacking} of {width} dimensions have no gradient from {done} prompts ({short} are "
            f"too short, {not_finite} gradients are not finite): rank {rank} needs at least "
            f"{-(-width // rank)} prompts of more than {fit.skip_first + 1} tokens"
        )
    jacobians = {}
    errors = list[float]()
    for layer in wanted:
        mean = sums.pop(layer).div_(counts[:, None])
        jacobians[layer] = mean[:width]
        exact = mean[width:]
        if len(exact):
            errors.append(float((held_out @ jacobians[layer] - exact).norm() / exact.norm()))
    return jacobians, JacobianRecord(
        method="exact" if rank == width else "sketched",
        prompts=done,
        rank=rank,
        seed=fit.seed,
        skip_first=fit.skip_first,
        max_tokens=fit.max_tokens,
        short=short,
        not_finite=not_finite,
        errors=errors,
    )


def fit_to_folder(
    points: Points,
    stored: StoredLensFit,
    folder: Path,
    check: StopCheck = lambda: None,
    report: Callable[[LensProgress], None] = lambda done: None,
) -> JacobianRecord:
    """Fit a lens and write it to `folder`, with the model's output matrix in its own dtype; the
    folder can be registered. Returns the record of the fit. `report` is called before each prompt.

    Raises what `fit_jacobian_lens` raises, OSError, and MidstreamError("gradients_refused") with
    the figures where memory is lacking.
    """
    needed = fit_memory(len(stored.layers), points.hidden_size)
    free = free_bytes()
    if needed > free:
        raise refused(
            f"the fit of {len(stored.layers)} layers takes {needed / GIB:.1f} GiB of host memory, "
            f"and {free / GIB:.1f} GiB are free: give fewer layers"
        )

    def prompts() -> Iterator[list[int]]:
        for number, tokens in enumerate(stored.prompts):
            report(LensProgress(prompts=number, of=len(stored.prompts)))
            yield tokens

    longest = min(max(map(len, stored.prompts)), stored.fit.max_tokens)
    sites: list[SiteKey] = [("post_block", layer) for layer in stored.layers]
    batch = at_once(Footprint(points), longest, sites, free_on(points), most=BATCH)
    jacobians, record = fit_jacobian_lens(
        points, prompts(), stored.layers, stored.fit, check, batch
    )
    head = points.model.get_output_embeddings().weight.detach().cpu()
    if (dtype := str(head.dtype).removeprefix("torch.")) == "bfloat16":  # numpy has none
        head = head.view(torch.uint16)
    arrays = {layer: matrix.numpy() for layer, matrix in jacobians.items()}
    write(folder, arrays, record, Matrix(head.numpy(), dtype))
    return record


def _products(
    run: ForwardPass, sites: Sequence[SiteKey], places: slice, vectors: torch.Tensor
) -> list[torch.Tensor]:
    """Return the products of vectors `[n, hidden]` with one prompt's Jacobian by each site's rows,
    `[n, hidden]` on the host: gradients of the sum over target places, averaged over source places.

    `run`: copies of the prompt, at least n; the last of `sites` is the target.
    """
    *sources, target = (run.raw[site] for site in sites)
    cotangent = torch.zeros_like(target)
    cotangent[: len(vectors), places] = vectors[:, None].to(cotangent)
    gradients = torch.autograd.grad(target, sources, cotangent, retain_graph=True)
    return [grad[: len(vectors), places].float().mean(1).cpu() for grad in gradients]
