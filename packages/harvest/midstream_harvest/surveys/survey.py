"""A survey of a harvest, or of two that are compared: one pass over their rows, and its file."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.base.records import to_json
from midstream.workers.engine.model_identity import digests_in
from midstream.workers.engine.proof.reference import (
    Checkpoint,
    NotComparableError,
    TransformersReference,
)
from midstream.workers.runner.readings.sae import CHUNK_BYTES, Autoencoder, load_registered

from ..files.shards import Harvest, open as open_harvest, put, shard_buffers
from ..records.harvests import SurveyEntry, SurveyTask
from ..records.work import Survey
from .rows import DocumentRows, Examples, by_document

#: A survey uses this part of the machine's cores at most, and gives way to the model like helper
#: threads of ranks: it gets an eighth of the time of a thread that it competes with.
CORES_DIVISOR = 4
NICENESS = 10
#: Bytes of a token's logits, by token of the vocabulary, while predictions are compared.
LOGIT_BYTES = 64
#: What an engine without a checkpoint would record in its harvests.
NO_CHECKPOINT = Checkpoint(refused="this engine has no checkpoint")


# In a process on the model's worker that shares no lock with the model's thread or the event loop.
# Not in the gradient queue: most installations have no gradient worker.
def run_survey(task: SurveyTask) -> SurveyEntry:
    """Compute the survey and write its file. Raises MidstreamError, OSError, DamagedBlob."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CORES_DIVISOR))
    survey = task.survey
    harvests = [open_harvest(uri) for uri in survey.uris]
    found = [Examples(0, survey.top, survey.context) for _ in harvests]
    if survey.sae is not None:
        sae = load_registered(survey.sae, task.sae_root, task.sae_bytes)
        # a comparison needs only the figures
        kept = (1, 0) if survey.against else (survey.top, survey.context)
        site = survey.sae.hook, survey.sae.layer
        found = [featured(sae, by_document(each, *site, kept[1]), *kept) for each in harvests]
    arrays = found[0].arrays
    mean_kl = None
    if survey.against:
        compared, kl = divergences(heads(harvests, task.data_dir), harvests, survey)
        arrays = compared.arrays | {"kl": kl}
        mean_kl = float(kl.sum(dtype=np.float64) / max(1, len(kl)))
    active, total = np.stack([one.figures for one in found], 2)
    arrays["active"] = active.astype(np.int64)
    arrays["mean"] = (total / np.maximum(1, active)).astype(np.float32)
    key = f"surveys/{task.job}.safetensors"
    kinds = {"i": "int64", "f": "float32"}
    tensors = [(name, kinds[array.dtype.kind], array) for name, array in arrays.items()]
    buffers, size, crc32 = shard_buffers(tensors, {"survey": to_json(survey).decode()})
    put(harvests[0].store, key, buffers)
    return SurveyEntry(
        job=task.job,
        survey=survey,
        rows=len(harvests[0]),
        mean_kl=mean_kl,
        key=key,
        bytes=size,
        crc32=crc32,
    )


# Document by document: short ones make smaller matrix products, but no example has to be kept apart
# from those of other documents.
def featured(
    sae: Autoencoder, documents: Iterable[tuple[DocumentRows, int, int]], top: int, context: int
) -> Examples:
    """Return the figures and examples of all features. `documents`: as `by_document` yields them,
    with `context`. Activations are computed for a bounded
    number of rows at a time; in a row that is not finite, no feature is active.
    """
    examples = Examples(sae.form.d_sae, top, context)
    size = max(1, context, CHUNK_BYTES // (4 * max(sae.form.d_sae, sae.form.d_in)))
    for document, begin, end in documents:
        for start in range(begin, end, size):
            first = max(0, start - context)
            stop = min(start + size, end)
            rows = document.part(first, stop + context)
            finite = np.isfinite(rows.values).all(axis=1, keepdims=True)
            with torch.inference_mode():
                values = sae.encode(torch.from_numpy(np.where(finite, rows.values, 0))).numpy()
            rows = rows._replace(values=np.where(finite, values, 0))
            examples.add(rows, start - first, stop - first)
    return examples


# Predictions come from `post_block` of the last layer and each model's own head: a hook for logits
# would store a vocabulary for each token, 50 to 200 times as much as a row.
def heads(harvests: Sequence[Harvest], data_dir: str) -> list[TransformersReference]:
    """Load the final norm and output matrix of the checkpoint that computed each harvest, in
    transformers and float32. Raises `invalid_request` where that is impossible: for a reason that
    the checkpoint's own worker recorded, if its files are missing here or have changed since, or if
    the vocabularies differ.
    """
    same = harvests[0].manifest.checkpoint == harvests[1].manifest.checkpoint
    differing = harvests if not same else harvests[:1]
    loaded = [_head(harvest, data_dir) for harvest in differing]
    sizes = [head.config.get_text_config().vocab_size for head in loaded]
    if sizes[0] != sizes[-1]:
        raise invalid("against", f"the models' vocabularies have {sizes[0]} and {sizes[1]} tokens")
    return [loaded[0], loaded[-1]]


def _head(harvest: Harvest, data_dir: str) -> TransformersReference:
    source = Checkpoint(*harvest.manifest.checkpoint or NO_CHECKPOINT)
    try:
        if source.refused:
            raise NotComparableError(source.refused)
        kept = digests_in(data_dir)
        if "@" not in source.content and kept.of(Path(source.path)) != source.content:
            raise NotComparableError(f"the files in {source.path} have changed since")
        model = TransformersReference(source)
        model.load()
    except (NotComparableError, MidstreamError) as error:
        raise invalid(
            "against",
            f"the predictions of {harvest.manifest.id}, by {harvest.manifest.model}, cannot be "
            f"computed from its rows: {error}",
        ) from error
    return model


def divergences(
    models: Sequence[TransformersReference], harvests: Sequence[Harvest], survey: Survey
) -> tuple[Examples, np.ndarray]:
    """Return the tokens with the largest KL(first ‖ second) of the next-token distributions, and
    that of each row, in nats, from float64 log-probabilities; 0 where a row is not finite.

    Raises MidstreamError if the harvests have other tokens, or lack the last layer.
    """
    examples = Examples(1, survey.top, survey.context)
    kl = [np.zeros(0, np.float32)]
    configs = [model.config.get_text_config() for model in models]
    sides = [
        by_document(harvest, "post_block", config.num_hidden_layers - 1, survey.context)
        for harvest, config in zip(harvests, configs, strict=True)
    ]
    vocabulary = configs[0].vocab_size
    # transformers' pass takes as many tokens as rows, and they have different ids
    size = max(1, min(vocabulary, CHUNK_BYTES // (LOGIT_BYTES * vocabulary)))
    for (first, start, stop), (second, *_) in zip(*sides, strict=False):
        same = map(np.array_equal, first[:3], second[:3])
        if len(harvests[0]) != len(harvests[1]) or not all(same):
            raise MidstreamError("conflict", f"{survey.against} has rows of other tokens")
        parts = []
        for at in range(0, len(first.positions), size):
            p, q = (
                model.logits(torch.from_numpy(side.values[at : at + size])).double().log_softmax(-1)
                for model, side in zip(models, (first, second), strict=True)
            )
            parts.append((p.exp() * (p - q)).nan_to_num_(nan=0.0).sum(1).clamp_min_(0))
        values = torch.cat(parts).float().numpy()
        kl.append(values[start:stop])
        examples.add(first._replace(values=values[:, None]), start, stop)
    return examples, np.concatenate(kl)
