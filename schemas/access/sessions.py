"""Sessions of the page: login with an API key, the stored session, and the page's view of it."""

from typing import Annotated, Literal

import msgspec

from ..base import Published, Record
from .keys import KeyId, Scope

#: The longest key that a login accepts, in characters; real keys have at most 272.
MAX_LOGIN_KEY = 512
#: How long a session lasts, in seconds, unless its key is revoked or expires earlier.
SESSION_S = 12 * 3600
#: The most concurrent sessions of one key.
MAX_SESSIONS = 100


class SessionRequest(Record):
    """Body of `POST /session`."""

    key: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_LOGIN_KEY)]


class Session(Record):
    """Stored session, under a hash of its id, so that a reader of Redis cannot use it."""

    key: KeyId
    sha256: str  # of the key's secret, so that a new key with the same id does not match
    csrf: str  # every call that changes state must repeat it in the header `x-midstream-csrf`
    created: float
    expires: float  # seconds since the epoch


class SessionView(Published, kw_only=True):
    """Answer of `GET /session` and `POST /session`: who is logged in, and with which scopes."""

    version: str
    auth: Literal["keys", "open"]  # `open`: no login is needed
    signed_in: bool
    csrf: str = ""
    tenant: str | None = None
    key: str = ""  # its id
    key_name: str = ""
    scopes: list[Scope] = []
    expires: float | None = None  # of the session
    links: dict[str, str] = {}  # name → URL of related pages: docs, Flower, Grafana
