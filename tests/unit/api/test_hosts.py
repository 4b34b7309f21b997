"""Which names, and which pages, does the API take a call from?"""

import pytest
from refusal_kit import refuses

from midstream.api.__main__ import serve
from midstream.broker.processes.hosts import Hosts
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings, SettingsError, asks_for_keys

OPEN = Settings()  # on loopback nobody is asked for a key
KEYS = Settings(auth="keys")
NAMED = Settings(api_host="0.0.0.0", allowed_hosts="mid.example")
ANYONE = Settings(api_host="0.0.0.0", auth="open")
LAB = Settings(allowed_hosts="Lab.example, 10.0.0.7,fe80::1", public_url="https://mid.example/x")
OWN = "http://localhost:8321"


def refused(
    settings: Settings, hosts: list[str], origins: list[str] | None = None, method: str = "GET"
) -> str:
    """The kind of the refusal; empty: none."""
    try:
        Hosts(settings, settings.api_host, asks_for_keys(settings)).check(
            method, hosts, origins or []
        )
    except MidstreamError as error:
        return error.kind
    return ""


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        (OPEN, "localhost, 127.0.0.1, [::1]"),
        (
            Settings(api_host="::1", allowed_hosts="localhost,lab.example,fe80::1"),
            "localhost, 127.0.0.1, [::1], [fe80::1], lab.example",
        ),
        (
            Settings(api_host="0.0.0.0", auth="open", public_url="http://lab.example"),
            "localhost, 127.0.0.1, [::1], any address, lab.example",
        ),
    ],
)
def test_a_refusal_names_each_host_once(settings: Settings, allowed: str) -> None:
    with refuses(allowed=allowed):
        Hosts(settings, settings.api_host, asks_for_keys(settings)).check(
            "GET", ["evil.example"], []
        )


@pytest.mark.parametrize(
    ("settings", "hosts", "origin", "said"),
    [
        # on loopback, its names with any port, and nothing else
        *(
            (OPEN, [host], "", "")
            for host in (
                "localhost",
                "LocalHost:8321",
                "127.0.0.1",
                "127.0.0.1:80",
                "127.0.0.2",
                "[::1]",
                "[::1]:8321",
            )
        ),
        *(
            (OPEN, [host], "", "misdirected")
            for host in (
                "evil.example",
                "evil.example:8321",
                "localhost.evil.example",
                "127.0.0.1.evil.example",
                "127.0.0.1@evil.example",
                "evil.example@127.0.0.1",
                "localhost:80:80",
                "localhost:8321.evil.example",
                "[::1].evil.example",
                "[::1]evil",
                "::1",
                "",
                " localhost",
                "localhost\t",
                "localhost/x",
                "10.0.0.7",
                "0.0.0.0",
                "[fe80::1]",
            )
        ),
        *(
            (OPEN, hosts, "", "misdirected")
            for hosts in ([], ["localhost", "evil.example"], ["localhost"] * 2)
        ),
        *(
            (LAB, [host], "", "")
            for host in ("lab.EXAMPLE:99", "10.0.0.7", "[fe80::1]:1", "mid.example", "localhost")
        ),
        (LAB, ["x.lab.example"], "", "misdirected"),
        # with keys any host and origin is allowed, until some are configured
        (KEYS, ["any.example"], "", ""),
        *(
            (Settings(auth="keys", allowed_hosts="mid.example"), [host], "", said)
            for host, said in (
                ("mid.example", ""),
                ("127.0.0.1:8321", ""),
                ("any.example", "misdirected"),
            )
        ),
        # Prometheus finds containers by their addresses
        (NAMED, ["172.18.0.5:8321"], "", ""),
        (NAMED, ["evil.example"], "", "misdirected"),
        (KEYS, ["mid.example"], "https://evil.example", ""),
        # without keys, off loopback: addresses, and their own pages
        *((ANYONE, [host], "", "") for host in ("10.0.0.7:8321", "[fe80::1]", "localhost")),
        (ANYONE, ["evil.example"], "", "misdirected"),
        (ANYONE, ["10.0.0.7:8321"], "http://203.0.113.5", "cross_site"),
        (ANYONE, ["10.0.0.7:8321"], "http://10.0.0.7:8321", ""),
        (ANYONE, ["[fe80::1]:8321"], "http://[fe80::1]:8321", ""),
    ],
)
def test_where_and_how_the_api_listens_decides_which_hosts_and_origins_are_allowed(
    settings: Settings, hosts: list[str], origin: str, said: str
) -> None:
    origins = [origin] if origin else []
    assert refused(settings, hosts, origins, "POST" if origin else "GET") == said


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://localhost.evil.example:8321",
        "null",
        "file://",
        "http://10.0.0.7",
        "",
    ],
)
def test_cross_origin_pages_may_only_read(origin: str) -> None:
    assert refused(OPEN, ["localhost:8321"], [origin], "POST") == "cross_site"
    assert refused(OPEN, ["localhost:8321"], [OWN, origin], "DELETE") == "cross_site"
    assert refused(OPEN, ["localhost:8321"], [origin]) == ""


def test_same_origin_pages_may_write() -> None:
    assert refused(OPEN, ["localhost:8321"], [OWN], "POST") == ""
    assert (
        refused(
            Settings(allowed_hosts="lab.example"), ["lab.example"], ["https://lab.example"], "PUT"
        )
        == ""
    )


@pytest.mark.parametrize(
    "wrong", ["https://mid.example", "mid.example:8321", "a b", "mid.example,x/y", "*@x"]
)
def test_an_invalid_allowed_host_stops_the_start(wrong: str) -> None:
    with pytest.raises(SettingsError, match="MIDSTREAM_ALLOWED_HOSTS"):
        serve(Settings(redis_url="redis://127.0.0.1:1/0", allowed_hosts=wrong))
