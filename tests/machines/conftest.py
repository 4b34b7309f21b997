"""All tests here lay out machines; without root they are skipped, with the reason.

`make test-machines` stops instead.
"""

import pytest
from network import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    for item in items:
        if "/tests/machines/" in str(item.path):
            reason = reason or why_not() or "-"
            if reason != "-":
                item.add_marker(pytest.mark.skip(reason=reason))
