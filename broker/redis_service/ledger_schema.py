"""Refuses a ledger that another version has written and this one cannot read, before anything is
written; records the newest version that has written there. What compares them:
`schemas.service.stored_schema`.
"""

from typing import Any

from ...schemas.base.version import __version__
from ...schemas.service.stored_schema import READABLE_FROM, SCHEMA, StoredSchema, refuse

#: Facts about the whole installation.
SERVICE = "ms:service"
FIELDS = ("schema", "readable_from", "written_by")

#: In one script, so that of two versions that start at once the newer one stays.
_RAISE = """
if (tonumber(redis.call('HGET', KEYS[1], 'schema')) or 0) < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'readable_from', ARGV[2], 'written_by', ARGV[3])
end
"""


def of_redis(client: Any) -> StoredSchema | None:
    """Return what the ledger says; None: no version has recorded anything there."""
    schema, readable_from, version = client.hmget(SERVICE, FIELDS)
    if schema is None:
        return None
    return StoredSchema(
        schema=int(schema), readable_from=int(readable_from), version=version.decode()
    )


def claim_redis(client: Any) -> None:
    """Record that this version writes to the ledger. Raises MidstreamError("version_mismatch") if
    it cannot read what is there.
    """
    found = of_redis(client)
    refuse("the ledger in Redis", found)
    if found is None or found.schema < SCHEMA:
        client.eval(_RAISE, 1, SERVICE, SCHEMA, READABLE_FROM, __version__)


def lower_redis(client: Any) -> None:
    """Record this version in place of a newer one, once it is known that it can go on."""
    values = (SCHEMA, READABLE_FROM, __version__)
    client.hset(SERVICE, mapping=dict(zip(FIELDS, values, strict=True)))
