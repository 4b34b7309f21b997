"""When is a webhook sent again, and which addresses may it be sent to at all?"""

import asyncio
import random
import threading
from email.utils import formatdate
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import pytest
from hypothesis import given, strategies as st

from midstream.schemas.access.handling import Callback, Handling, callback_of
from midstream.schemas.base.states import ENDS
from midstream_webhooks.http import (
    SECRET_PREFIX,
    CheckedBackend,
    Poster,
    TargetRefused,
    signature,
)
from midstream_webhooks.sender import (
    JITTER,
    LADDER_S,
    RETRY_AFTER_MAX_S,
    TENANT_SLOTS,
    due_again,
    retry_after,
)
from midstream_webhooks.targets import refusal, url_fault

# The ladder


def test_the_retry_schedule_is_ten_attempts_over_three_days() -> None:
    at = 0.0
    seen = []
    while (due := due_again(len(seen) + 1, at, chance=_Least())) is not None:
        seen.append(due - at)
        at = due
    assert seen == [5, 300, 1800, 7200, 18_000, 36_000, 50_400, 72_000, 86_400]


class _Least(random.Random):
    def random(self) -> float:
        return 0.0


@given(tries=st.integers(1, len(LADDER_S) - 1), seed=st.integers())
def test_jitter_only_makes_a_pause_longer_and_by_a_fifth_at_most(tries: int, seed: int) -> None:
    due = due_again(tries, 1000.0, chance=random.Random(seed))
    assert 1000 + LADDER_S[tries] <= due <= 1000 + LADDER_S[tries] * (1 + JITTER)


def test_retries_are_spread_by_jitter() -> None:
    assert len({due_again(2, 0.0, chance=random.Random(seed)) for seed in range(20)}) == 20


# Retry-After


@pytest.mark.parametrize(
    ("status", "header", "seconds"),
    [
        (429, "120", 120.0),
        (503, " 7 ", 7.0),
        (503, formatdate(1_000_060, usegmt=True), 60.0),
        (429, formatdate(999_000, usegmt=True), 0.0),  # in the past
        (429, "999999999999999999999", RETRY_AFTER_MAX_S),
        (429, "Fri, 31 Dec 9999 23:59:59 GMT", RETRY_AFTER_MAX_S),
        (500, "120", 0.0),  # not a status that may wish
        (429, None, 0.0),
        (429, "soon", 0.0),
        (429, "-5", 0.0),
        (429, "", 0.0),
    ],
)
def test_a_receiver_may_ask_for_a_pause_in_seconds_or_by_date_and_for_a_day_at_most(
    status: int, header: str | None, seconds: float
) -> None:
    assert retry_after(status, header, 1_000_000.0) == pytest.approx(seconds)


@given(st.text(max_size=60))
def test_no_retry_after_breaks_the_schedule(header: str) -> None:
    assert 0 <= retry_after(503, header, 0.0) <= RETRY_AFTER_MAX_S


def test_the_longer_of_schedule_and_retry_after_counts() -> None:
    assert due_again(1, 0.0, least_s=3600.0) == 3600.0
    assert due_again(5, 0.0, least_s=10.0) >= LADDER_S[5]


# Signatures: the tests with a real receiver check them with another implementation


def test_the_signature_is_that_of_the_standards_own_example() -> None:
    signed = signature(
        [SECRET_PREFIX + "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"],
        "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}',
    )  # fmt: skip
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


# Addresses: field case 41


#: By the registries of special-purpose addresses: what is nobody's receiver.
SPECIAL = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
    "168.63.129.16/32",
    "::/128",
    "::1/128",
    "::/96",
    "::ffff:0:0/96",
    "64:ff9b:1::/48",
    "100::/64",
    "100:0:0:1::/64",
    "2001::/23",
    "2001::/32",
    "2001:db8::/32",
    "2002::/16",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fd00:ec2::254/128",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
]


@pytest.mark.parametrize("network", SPECIAL)
def test_no_address_of_a_special_network_is_called(network: str) -> None:  # field case 41
    found = IPv6Network(network) if ":" in network else IPv4Network(network)
    chance = random.Random(network)
    for address in (
        found[0],
        found[-1],
        *(found[chance.randrange(found.num_addresses)] for _ in range(20)),
    ):
        assert refusal(address), f"{address} would be called"


@pytest.mark.parametrize(
    "address",
    [
        "1.1.1.1",
        "8.8.8.8",
        "93.184.215.14",
        "2606:4700:4700::1111",
        "2a00:1450:4001::8a",
        "64:ff9b::808:808",
    ],
)
def test_public_addresses_are_called(address: str) -> None:
    assert refusal(ip_address(address)) is None


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "64:ff9b::a9fe:a9fe",
        "168.63.129.16",
        "fd00:ec2::254",
        "2002:a9fe:a9fe::",
        "2002:a9fe:a9fe::1",
        "::169.254.169.254",
        "::ffff:0:a9fe:a9fe",
        "64:ff9b:1::a9fe:a9fe",
        "2001:0:a9fe:a9fe::",
        "2001:0:102:304:0:0:5601:5601",
        "2606:4700::5efe:169.254.169.254",
        "fe80::200:5efe:a9fe:a9fe",
        "2002:a83f:8110::",
        "::100.100.100.200",
        "192.0.0.192",
        "::ffff:192.0.0.192",
        "169.254.170.23",
        "fd00:ec2::23",
        "fe80::a9fe:a9fe",
    ],
)
async def test_cloud_metadata_is_blocked_even_with_private_allowed(
    address: str,
) -> None:  # field case 41
    assert refusal(ip_address(address), allow_private=True)
    assert refusal(ip_address("127.0.0.1"), allow_private=True) is None
    host = f"[{address}]" if ":" in address else address
    assert "always blocked" in (url_fault(f"http://{host}/latest", True) or "")
    with pytest.raises(TargetRefused):
        await CheckedBackend(allow_private=True, resolve=nothing).connect_tcp(address, 80)


async def nothing(host: str, port: int) -> list[str]:
    return []


@given(st.ip_addresses(v=4))
def test_allowed_ipv4_addresses_are_global(address: IPv4Address) -> None:  # field case 41
    if refusal(address) is None:
        assert address.is_global
        assert not address.is_multicast
        assert not address.is_reserved


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_not_smuggled_inside_an_ipv6_address(inner: IPv4Address) -> None:
    # field case 41
    number = int(inner)
    assert refusal(IPv6Address((0xFFFF << 32) | number))  # mapped
    assert refusal(IPv6Address(number))  # compatible
    assert refusal(IPv6Address((0x2002 << 112) | (number << 80)))  # 6to4
    assert refusal(IPv6Address((0x64FF9B << 96) | number)) == refusal(inner)  # NAT64 leads there


@given(st.ip_addresses(v=6))
def test_only_global_unicast_ipv6_is_allowed(address: IPv6Address) -> None:  # field case 41
    if refusal(address) is None:
        assert address in IPv6Network("2000::/3") or address in IPv6Network("64:ff9b::/96")


@pytest.mark.parametrize(
    "url",
    [
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com",
        "//example.com/x",
        "example.com/hook",
        "",
        "http://",
        "http:///x",
        "https://user@example.com/",
        "https://user:secret@example.com/",
        "https://example.com/#part",
        "https://example.com/\n",
        "https://exa mple.com/",
        "https://bücher.example/",
        "http://example.com\\@127.0.0.1/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://[::1/",
        "https://[v1.x]/",
        "http://exa|mple.com/",
        "http://-x.com/",
        f"http://{'a.' * 130}com/",
    ],
)
@pytest.mark.parametrize("allow", [False, True], ids=["public only", "private allowed"])
def test_a_url_that_is_wrong_in_itself_is_refused_whatever_is_allowed(
    url: str, allow: bool
) -> None:
    assert url_fault(url, allow)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://127.0.0.1:8321/v1/jobs",
        "http://10.1.2.3/",
        "http://169.254.169.253/",
        "http://0.0.0.0/",
        "http://[::1]/",
        "http://[::]/",
        "http://[fe80::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[64:ff9b::7f00:1]/",
        "http://localhost/",
        "http://LOCALHOST:80/",
        "http://x.localhost./",
        "http://100.100.100.201/",
    ],
)
def test_a_private_address_in_a_url_is_refused_unless_it_is_allowed(url: str) -> None:
    # field case 41
    assert "webhook_allow_private" in (url_fault(url, False) or "")
    assert url_fault(url, True) is None


# What the C library would read as 127.0.0.1, and the standard library would not.
@pytest.mark.parametrize(
    "host",
    [
        "127.1",
        "2130706433",
        "0x7f000001",
        "0177.0.0.1",
        "127.0.0.1.",
        "0x7f.1",
        "1.2.3.400",
        "127.0.0.01",
    ],
)
def test_disguised_ipv4_addresses_are_refused(host: str) -> None:  # field case 41
    assert "IPv4" in (url_fault(f"http://{host}/", False) or "")


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook?a=1",
        "http://hooks.example.co.uk:8080/x",
        "https://xn--bcher-kva.example/",
        "https://1.1.1.1/",
        "http://my_host/",
    ],
)
def test_an_ordinary_webhook_url_is_accepted(url: str) -> None:
    assert url_fault(url, False) is None


# What is told


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("wiki.corp", r"^wiki\.corp resolves to an address that is private$"),
        ("10.0.0.1", r"^10\.0\.0\.1 is private$"),
    ],
)
async def test_errors_do_not_reveal_internal_addresses(host: str, said: str) -> None:
    async def found(host: str, port: int) -> list[str]:
        return ["10.11.12.13"]

    with pytest.raises(TargetRefused, match=said):
        await CheckedBackend(allow_private=False, resolve=found).connect_tcp(host, 443)


async def test_unresolvable_names_do_not_block_other_lookups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host.startswith("slow"):
            answered.wait(120)
        return [(0, 0, 0, "", ("1.1.1.1", port))]

    monkeypatch.setattr("midstream_webhooks.http.socket.getaddrinfo", look_up)
    poster = Poster(allow_private=False, timeout_s=120)
    slow = [
        asyncio.create_task(poster._look_up(f"slow{number}.example", 443))
        for number in range(TENANT_SLOTS)
    ]
    try:
        assert await poster._look_up("quick.example", 443) == ["1.1.1.1"]
        assert not any(task.done() for task in slow)
    finally:
        answered.set()
        await asyncio.gather(*slow)
        await poster.close()


def test_callback_events_default_to_every_end_once_each() -> None:
    url = "https://a.example"
    assert callback_of(Handling()) is None
    assert callback_of(Handling(callback_url=url)) == Callback(url=url, events=list(ENDS))
    twice = Handling(callback_url=url, callback_events=["job.failed", "job.failed"])
    assert callback_of(twice) == Callback(url=url, events=["job.failed"])
