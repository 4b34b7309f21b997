"""What an entry of the audit log stores of addresses."""

import pytest

from midstream.broker.ledger.people.audit import state_of


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("https://a.example/hook", "https://a.example/hook"),
        ("https://a.example/hook?token=abc&x=1", "https://a.example/hook?***"),
        ("http://a.example#abc", "http://a.example?***"),
        ("https://a:b@a.example/x?token=abc", "https://a:***@a.example/x?***"),
    ],
)
def test_addresses_are_stored_without_what_may_be_a_key(url: str, stored: str) -> None:
    assert state_of({"actions": [{"url": url}], "note": "why?"}) == {
        "actions": [{"url": stored}],
        "note": "why?",
    }
