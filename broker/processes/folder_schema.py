"""Refuses a data directory that another version has written and this one cannot read; records the
newest version that has written there. What compares them: `schemas.service.stored_schema`.
"""

from pathlib import Path

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import from_json, to_json
from ...schemas.service.stored_schema import SCHEMA, StoredSchema, own, refuse

#: File of a data directory.
FILE = "schema.json"


def of_folder(data: Path) -> StoredSchema | None:
    """Return what a data directory says; None: no version has recorded anything there. Raises
    MidstreamError("version_mismatch") for what cannot be read.
    """
    try:
        return from_json((data / FILE).read_bytes(), StoredSchema)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise MidstreamError("version_mismatch", f"{data / FILE} is unreadable: {error}") from error


def claim_folder(data: Path) -> None:
    """Record that this version writes to a data directory. Raises
    MidstreamError("version_mismatch") if it cannot read what is there, and OSError.
    """
    found = of_folder(data)
    refuse(f"the data directory {data}", found)
    if found is None or found.schema < SCHEMA:
        lower_folder(data)


def lower_folder(data: Path) -> None:
    """Record this version, also in place of a newer one. Raises OSError."""
    aside = data / f".{FILE}.part"
    aside.write_bytes(to_json(own()))
    aside.rename(data / FILE)
