"""What the API makes of the body of a bank."""

import hashlib

import numpy as np

from midstream.api.context import AppContext
from midstream.api.routes.steering import Made
from midstream.schemas.access.keys import Caller
from midstream.schemas.base.errors import invalid
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.models import ModelInfo

from . import Bank, BankRequest


async def make(
    data: BankRequest, name: str, info: ModelInfo, context: AppContext, caller: Caller
) -> Made:
    """Raises a 400 naming the direction at fault."""
    units = [
        _unit(f"directions.{label}", numbers, info) for label, numbers in data.directions.items()
    ]
    labels = list(data.directions)
    raw = np.array(units, dtype="<f4").tobytes()
    digest = hashlib.sha256(to_msgpack([labels, raw])).hexdigest()
    bank = data.registered(Bank, name, info.name, digest=digest, labels=labels, units=raw)
    return lambda _: bank, {}


def _unit(field: str, numbers: list[float], info: ModelInfo) -> np.ndarray:
    if len(numbers) != info.hidden_size:
        raise invalid(field, f"has {len(numbers)} numbers", allowed=str(info.hidden_size))
    length = np.linalg.norm(numbers)
    if not 0 < length < np.inf:
        raise invalid(field, "has no length", allowed="finite numbers, not all of them 0")
    return np.array(numbers) / length
