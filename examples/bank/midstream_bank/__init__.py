"""Banks: directions of the residual stream under labels, registered by name."""

from typing import Annotated

import msgspec

from midstream.schemas.artifacts.registered import ArtifactKind, Registered, Registration
from midstream.schemas.base.limits import Name

#: The most directions of a bank.
MOST = 16


class BankRequest(Registration, kw_only=True):
    """Body of `PUT /v1/artifacts/banks/{name}`."""

    # label → as many numbers as the model's rows have
    directions: Annotated[dict[Name, list[float]], msgspec.Meta(min_length=1, max_length=MOST)]


class Bank(Registered, kw_only=True):
    """A registered bank, as the ledger stores it and the API returns it."""

    labels: list[str]
    units: bytes  # little-endian float32 [labels, hidden size]: each direction, of length 1


BANKS = ArtifactKind(
    plural="banks",
    short="bank",
    noun="bank of directions",
    record=Bank,
    request=BankRequest,
    takes="`directions`: a label for each → as many numbers as the model's rows have.",
    make="midstream_bank.api:make",
    limit=100,
)
