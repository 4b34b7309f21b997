"""Sessions of the page, which begin with an API key."""

from ..base.records import Record
from .keys import KeyId

#: How long a session lasts, in seconds, unless its key is revoked or expires earlier.
SESSION_S = 12 * 3600
#: The most concurrent sessions of one key.
MAX_SESSIONS = 100


class Session(Record):
    """Stored session, under a hash of its id, so that a reader of Redis cannot use it."""

    key: KeyId
    sha256: str  # of the key's secret, so that a new key with the same id does not match
    csrf: str  # every call that changes state must repeat it in the header `x-midstream-csrf`
    created: float
    expires: float  # seconds since the epoch
