"""Which stored data a version reads."""

import pytest

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.service.stored_schema import (
    OLDEST_SCHEMA,
    SCHEMA,
    StoredSchema,
    own,
    refuse,
)


def test_a_version_reads_its_own_data_older_ones_and_newer_ones_that_stay_readable() -> None:
    refuse("the ledger", None)
    refuse("the ledger", own())
    refuse("the ledger", StoredSchema(schema=OLDEST_SCHEMA, readable_from=0, version="0.0.9"))
    refuse("the ledger", StoredSchema(schema=SCHEMA + 5, readable_from=SCHEMA, version="9.0.0"))


@pytest.mark.parametrize(
    ("schema", "readable_from", "advice"),
    [
        (SCHEMA + 1, SCHEMA + 1, "start midstream 9.0.0 or a newer one"),
        (OLDEST_SCHEMA - 1, 0, "upgrade by a version in between"),
    ],
)
def test_other_data_are_refused_with_both_versions(
    schema: int, readable_from: int, advice: str
) -> None:
    found = StoredSchema(schema=schema, readable_from=readable_from, version="9.0.0")
    with pytest.raises(MidstreamError) as refused:
        refuse("the ledger", found)
    assert refused.value.kind == "version_mismatch"
    assert f"written by midstream 9.0.0 (stored schema {schema}" in str(refused.value)
    assert advice in str(refused.value)
