"""What the process of a survey gets from its worker."""

import msgspec

from ...schemas.jobs.harvests import StoredHarvest
from ...schemas.requests.harvest_work import Survey


class SurveyWork(msgspec.Struct, frozen=True):
    """A survey, and the settings of the worker that it needs."""

    job: str
    harvest: StoredHarvest
    survey: Survey
    sae_root: str
    sae_bytes: int  # the most of an autoencoder's weights
    threads: int
