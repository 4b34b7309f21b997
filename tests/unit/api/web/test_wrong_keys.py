"""The limit of wrong keys: a minute of each address, in bounded memory."""

import itertools

import pytest
from refusal_kit import refuses

from midstream.api.web import wrong_keys
from midstream.api.web.wrong_keys import WRONG_PER_MINUTE, WrongKeys, network_of
from midstream.schemas.base.errors import MidstreamError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(wrong_keys.time, "monotonic", lambda: now[0])
    return now


def test_an_address_has_its_wrong_keys_of_each_minute(clock: list[float]) -> None:
    wrong = WrongKeys()
    for _ in range(2):
        for _ in range(WRONG_PER_MINUTE):
            wrong.count("192.0.2.1")
        clock[0] += 59.0
        with refuses(kind="rate_limited", retry_after=2):
            wrong.count("192.0.2.1")
        wrong.count("192.0.2.2")
        clock[0] += 61.0


def test_remembered_addresses_are_bounded(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrong_keys, "REMEMBERED", 10)
    wrong = WrongKeys()
    for number in range(100):
        wrong.count(f"192.0.2.{number}")
    assert len(wrong._tried) == 10
    for _ in range(WRONG_PER_MINUTE - 1):
        wrong.count("192.0.2.99")
    with pytest.raises(MidstreamError):
        wrong.count("192.0.2.99")


@pytest.mark.parametrize(
    "alike",
    [
        ("2001:db8::1", "2001:db8::ffff:1"),  # one network of 64 bits is one client
        ("192.0.2.1", "::ffff:192.0.2.1"),
        ("x" * 100, "x" * 1000),  # what a proxy passes on and is no address
    ],
)
def test_addresses_of_one_client_are_counted_together(alike: tuple[str, str]) -> None:
    assert network_of(alike[0]) == network_of(alike[1])


def test_addresses_of_several_clients_are_counted_apart() -> None:
    names = [
        network_of(address)
        for address in ("192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8:0:1::1", "")
    ]
    assert not any(one == other for one, other in itertools.combinations(names, 2))
