"""Compatibility with what another version has stored, in Redis and in a data directory.

`SCHEMA` grows with every change to what is stored that a version with the previous number could
misread. `OLDEST_SCHEMA` is the oldest number whose data this version reads. `READABLE_FROM` is the
oldest number of a version that reads what this one stores: as long as it stays, older versions may
be started again on newer data. What processes exchange has numbers of its own: `compatibility`.
"""

from ..base.errors import MidstreamError
from ..base.records import Published
from ..base.version import __version__

#: 0: versions that recorded no number.
SCHEMA = 1
OLDEST_SCHEMA = 0
READABLE_FROM = 1


class StoredSchema(Published):
    """What a place with data says of the newest version that has written there."""

    schema: int
    readable_from: int
    version: str


def own() -> StoredSchema:
    """Return what this version records."""
    return StoredSchema(schema=SCHEMA, readable_from=READABLE_FROM, version=__version__)


def refuse(what: str, found: StoredSchema | None) -> None:
    """Raise MidstreamError("version_mismatch") if this version cannot read what is stored in
    `what`. None: versions that recorded nothing have written it.
    """
    if found is None or (found.schema >= OLDEST_SCHEMA and found.readable_from <= SCHEMA):
        return
    newer = found.readable_from > SCHEMA
    raise MidstreamError(
        "version_mismatch",
        f"{what} was written by midstream {found.version} (stored schema {found.schema}, which "
        f"versions with schema {found.readable_from} and newer read); this is midstream "
        f"{__version__} with schema {SCHEMA}, which reads {OLDEST_SCHEMA} and newer",
        hint=f"start midstream {found.version} or a newer one, or restore a backup that an older "
        "version made (`midstream restore`)"
        if newer
        else "upgrade by a version in between, which reads both",
    )
