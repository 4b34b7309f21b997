"""A survey of a harvest: one pass over its rows, which writes the survey's file."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...schemas.jobs.harvests import MANIFEST
from ...schemas.jobs.surveys import SurveyEntry
from ...storage.harvests import Harvest
from ...storage.harvests import open as open_harvest
from ...storage.shards import checksum
from ...storage.surveys import survey_key, write_survey
from ..runner.readings.sae import CHUNK_BYTES, Autoencoder, load_registered
from .rows import Block, Examples, Figures, blocks_of, neighbourhoods, ordered_rows
from .work import SurveyWork


class Encoder:
    """Encodes blocks of rows, and counts those that are not finite, in which nothing is active."""

    def __init__(self, sae: Autoencoder) -> None:
        self._sae, self.non_finite = sae, 0

    def blocks(self, parts: Iterator[Block], context: int) -> Iterator[Block]:
        """Yield the activations of all rows, in blocks of bounded size."""
        form = self._sae.form
        rows = max(1, context, CHUNK_BYTES // (4 * max(form.d_sae, form.d_in)))
        for block in blocks_of(parts, rows):
            finite = np.isfinite(block.values).all(axis=1)
            self.non_finite += int((~finite).sum())
            with torch.inference_mode():
                values = self._sae.encode(
                    torch.from_numpy(np.where(finite[:, None], block.values, 0))
                )
            yield block._replace(values=values.numpy() * finite[:, None])


def run_survey(work: SurveyWork) -> SurveyEntry:
    """Compute the survey and write its file. Raises MidstreamError, OSError, DamagedBlob."""
    harvest, survey = open_harvest(work.harvest.uri), work.survey
    assert survey.sae is not None
    sae = load_registered(survey.sae, work.sae_root, work.sae_bytes)
    encoder = Encoder(sae)
    figures = Figures(sae.form.d_sae)
    examples = Examples(sae.form.d_sae, survey.top, survey.context)
    rows = ordered_rows(harvest, survey.sae.hook, survey.sae.layer)
    for block, start, stop in neighbourhoods(encoder.blocks(rows, survey.context), survey.context):
        figures.add(block.values[start:stop])
        examples.add(block, start, stop)
    return _written(
        work,
        harvest,
        {**figures.arrays(), **examples.arrays()},
        rows=figures.rows,
        non_finite=encoder.non_finite,
    )


def _written(
    work: SurveyWork, harvest: Harvest, arrays: Mapping[str, np.ndarray], **facts: Any
) -> SurveyEntry:
    survey, store, key = work.survey, harvest.store, survey_key(work.job)
    with store.open(MANIFEST) as handle:
        manifest = checksum(handle)
    identity = {
        "harvest": work.harvest.id,
        "manifest": str(manifest),
        "against": survey.against,
        "sae": "" if survey.sae is None else survey.sae.digest,
    }
    size, crc32 = write_survey(store, key, arrays, identity)
    sae = survey.sae
    named: dict[str, Any] = (
        {}
        if sae is None
        else {"sae": sae.name, "digest": sae.digest, "hook": sae.hook, "layer": sae.layer}
    )
    return SurveyEntry(
        job=work.job,
        harvest=work.harvest.id,
        features=survey.features,
        top=survey.top,
        context=survey.context,
        against=survey.against,
        identity=work.harvest.identity,
        manifest=manifest,
        key=key,
        bytes=size,
        crc32=crc32,
        **named,
        **facts,
    )
