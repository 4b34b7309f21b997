"""A survey of a harvest: one pass over its rows, which writes the survey's file."""

import os
from collections.abc import Iterator

import numpy as np
import torch

from ...schemas.jobs.harvests import MANIFEST, SurveyEntry, SurveyTask
from ...storage.harvests import open as open_harvest
from ...storage.shards import checksum, put, shard_buffers
from ..runner.base.process import die_with_parent
from ..runner.readings.sae import CHUNK_BYTES, Autoencoder, load_registered
from .rows import Block, Examples, blocks_of, neighbourhoods, ordered_rows

#: A survey uses this part of the machine's cores at most, at the lowest priority.
CORES_DIVISOR = 4
LOWEST = 19


def run_survey(task: SurveyTask) -> SurveyEntry:
    """Compute the survey and write its file. Raises MidstreamError, OSError, DamagedBlob."""
    die_with_parent()
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // CORES_DIVISOR))
    survey, harvest = task.survey, open_harvest(task.harvest.uri)
    assert survey.sae is not None
    sae = load_registered(survey.sae, task.sae_root, task.sae_bytes)
    examples = Examples(sae.form.d_sae, survey.top, survey.context)
    rows = ordered_rows(harvest, survey.sae.hook, survey.sae.layer)
    for around, start, stop in neighbourhoods(encoded(sae, rows, survey.context), survey.context):
        examples.add(around, start, stop)
    arrays = {**examples.arrays, "active": examples.active.astype(np.int64)[:, None]}
    arrays["mean"] = (examples.total / np.maximum(1, examples.active)).astype(np.float32)[:, None]
    kinds = {"i": "int64", "f": "float32"}
    tensors = [(name, kinds[array.dtype.kind], array) for name, array in arrays.items()]
    with harvest.store.open(MANIFEST) as handle:
        metadata = {"harvest": task.harvest.id, "manifest": f"{checksum(handle):08x}"}
    metadata |= {"sae": survey.sae.digest, "identity": task.harvest.identity}
    buffers, size, crc32 = shard_buffers(tensors, metadata)
    key = f"surveys/{task.job}.safetensors"
    put(harvest.store, key, buffers)
    return SurveyEntry(
        job=task.job, survey=survey, rows=len(harvest), key=key, bytes=size, crc32=crc32
    )


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
