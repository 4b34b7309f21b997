"""A survey of a harvest, or of two that are compared: one pass over their rows, and its file."""

import os
from collections.abc import Iterator

import numpy as np
import torch

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import to_json
from ...schemas.jobs.harvests import MANIFEST, SurveyEntry, SurveyTask
from ...schemas.requests.harvest_work import Survey
from ...storage.harvests import Harvest
from ...storage.harvests import open as open_harvest
from ...storage.shards import checksum, put, shard_buffers
from ..engine.proof.comparison import Source, reference_of
from ..engine.proof.reference import NotComparableError, Reference
from ..runner.base.process import die_with_parent
from ..runner.readings.sae import CHUNK_BYTES, Autoencoder, load_registered
from .rows import Block, Examples, blocks_of, neighbourhoods, ordered_rows

#: A survey uses this part of the machine's cores at most, and gives way to the model like helper
#: threads of ranks: it gets an eighth of the time of a thread that it competes with.
CORES_DIVISOR = 4
NICENESS = 10
FIGURES = ("active", "total")
#: Bytes of a token's logits, by token of the vocabulary, while predictions are compared.
LOGIT_BYTES = 64


def run_survey(task: SurveyTask) -> SurveyEntry:
    """Compute the survey and write its file. Raises MidstreamError, OSError, DamagedBlob."""
    die_with_parent()
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CORES_DIVISOR))
    survey = task.survey
    harvests = [open_harvest(uri) for uri in survey.uris]
    found = [Examples(0, survey.top, survey.context) for _ in harvests]
    if survey.sae is not None:
        sae = load_registered(survey.sae, task.sae_root, task.sae_bytes)
        # a comparison needs only the figures
        kept = (1, 0) if survey.against else (survey.top, survey.context)
        for number, harvest in enumerate(harvests):
            rows = ordered_rows(harvest, survey.sae.hook, survey.sae.layer)
            found[number] = _examples(encoded(sae, rows, kept[1]), sae.form.d_sae, *kept)
    active, total = (np.stack([getattr(one, name) for one in found], 1) for name in FIGURES)
    arrays, mean_kl = found[0].arrays, None
    if survey.against:
        kl: list[np.ndarray] = [np.zeros(0, np.float32)]
        blocks = divergences(reference(task), harvests, survey, kl)
        compared = _examples(blocks, 1, survey.top, survey.context)
        mean_kl = float(compared.total[0] / max(1, len(harvests[0])))
        arrays = {**compared.arrays, "kl": np.concatenate(kl)}
    arrays["active"] = active.astype(np.int64)
    arrays["mean"] = (total / np.maximum(1, active)).astype(np.float32)
    key = f"surveys/{task.job}.safetensors"
    size, crc32 = _write(harvests[0], key, survey, arrays)
    return SurveyEntry(
        job=task.job,
        survey=survey,
        rows=len(harvests[0]),
        mean_kl=mean_kl,
        key=key,
        bytes=size,
        crc32=crc32,
    )


def _examples(blocks: Iterator[Block], features: int, top: int, context: int) -> Examples:
    examples = Examples(features, top, context)
    for around, start, stop in neighbourhoods(blocks, context):
        examples.add(around, start, stop)
    return examples


def encoded(sae: Autoencoder, rows: Iterator[Block], context: int) -> Iterator[Block]:
    """Yield the activations of all rows, in blocks of bounded size. In a row that is not finite, no
    feature is active.
    """
    size = max(1, context, CHUNK_BYTES // (4 * max(sae.form.d_sae, sae.form.d_in)))
    for block in blocks_of(rows, size):
        finite = np.isfinite(block.values).all(axis=1, keepdims=True)
        with torch.inference_mode():
            values = sae.encode(torch.from_numpy(np.where(finite, block.values, 0))).numpy()
        yield block._replace(values=np.where(finite, values, 0))


def reference(task: SurveyTask) -> Reference:
    """Load the model's final norm and output matrix in transformers, in float32."""
    source = Source(*(task.checkpoint or ("", "", None, {}, 0.0, "this engine has no checkpoint")))
    try:
        if source.refused:
            raise NotComparableError(source.refused)
        model = reference_of(source)
        model.load()
    except NotComparableError as error:
        detail = f"its predictions cannot be computed from rows: {error}"
        raise MidstreamError("invalid_request", detail, field="against") from error
    return model


def divergences(
    model: Reference, harvests: list[Harvest], survey: Survey, kept: list[np.ndarray]
) -> Iterator[Block]:
    """Yield KL(first ‖ second) of the next-token distributions of each row, in nats, from float64
    log-probabilities; 0 where a row is not finite. All are appended to `kept` too.

    Raises MidstreamError if the harvests have other tokens.
    """
    vocabulary = model.config.get_text_config().vocab_size
    size = max(1, survey.context, CHUNK_BYTES // (LOGIT_BYTES * vocabulary))
    streams = [
        blocks_of(ordered_rows(harvest, "post_block", survey.last_layer), size)
        for harvest in harvests
    ]
    for first, second in zip(*streams, strict=False):
        if not all(map(np.array_equal, first[:3], second[:3])):
            raise MidstreamError("conflict", f"{survey.against} has rows of other tokens")
        p, q = (
            model.logits(torch.from_numpy(block.values)).double().log_softmax(-1)
            for block in (first, second)
        )
        kl = (p.exp() * (p - q)).nan_to_num_(nan=0.0).sum(1).clamp_min_(0)
        kept.append(kl.float().numpy())
        yield first._replace(values=kept[-1][:, None])


def _write(
    harvest: Harvest, key: str, survey: Survey, arrays: dict[str, np.ndarray]
) -> tuple[int, int]:
    """Write the survey's file; return its bytes and CRC32."""
    store = harvest.store
    with store.open(MANIFEST) as handle:
        metadata = {"manifest": f"{checksum(handle):08x}", "survey": to_json(survey).decode()}
    kinds = {"i": "int64", "f": "float32"}
    tensors = [(name, kinds[array.dtype.kind], array) for name, array in arrays.items()]
    buffers, size, crc32 = shard_buffers(tensors, metadata)
    put(store, key, buffers)
    return size, crc32
