"""Allowed webhook addresses: public ones only (SSRF protection).

A URL is checked twice: as it is written, when a job is submitted; and by every address of its host
name, when a webhook is sent.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

IPAddress = IPv4Address | IPv6Address

#: Metadata services of clouds, which hand out credentials: never called, regardless of the
#: settings.
_METADATA = {
    IPv4Address("169.254.169.254"),
    IPv4Address("169.254.170.2"),
    IPv4Address("169.254.170.23"),
    IPv4Address("169.254.42.42"),
    IPv4Address("168.63.129.16"),
    IPv4Address("100.100.100.200"),
    IPv4Address("192.0.0.192"),
    IPv6Address("fd00:ec2::254"),
    IPv6Address("fd00:ec2::23"),
    IPv6Address("fd00:42::42"),
    IPv6Address("fd20:ce::254"),
    IPv6Address("fe80::a9fe:a9fe"),
}
METADATA = "a cloud metadata address"
#: Not private by definition, but never a valid receiver.
_EXTRA: dict[IPv4Network | IPv6Network, str] = {
    IPv4Network("192.0.0.0/24"): "reserved",
    IPv4Network("192.88.99.0/24"): "reserved",
    IPv4Network("100.64.0.0/10"): "in the carrier-grade NAT range (CGNAT)",
    IPv6Network("2001::/23"): "reserved, or a tunnel address",
    IPv6Network("2001:db8::/32"): "reserved for documentation",
    IPv6Network("2002::/16"): "a tunnel address",
    IPv6Network("3fff::/20"): "reserved for documentation",
}
#: Every public IPv6 receiver is in this network, or is an IPv4 address behind NAT64.
_GLOBAL_V6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
#: Networks whose addresses embed an IPv4 address: (network, bits to the right of the IPv4 address,
#: mask with which it is XORed). A gateway or a kernel that knows the scheme sends such a packet to
#: the IPv4 address.
_EMBEDDING: tuple[tuple[IPv6Network, int, int], ...] = (
    (IPv6Network("::/96"), 0, 0),  # IPv4-compatible, RFC 4291
    (IPv6Network("::ffff:0:0/96"), 0, 0),  # IPv4-mapped, RFC 4291
    (IPv6Network("::ffff:0:0:0/96"), 0, 0),  # IPv4-translated, RFC 2765
    (_NAT64, 0, 0),  # RFC 6052
    # NAT64 of one network, RFC 8215, with a prefix of 96 bits
    (IPv6Network("64:ff9b:1::/48"), 0, 0),
    (IPv6Network("2002::/16"), 80, 0),  # 6to4, RFC 3056
    (IPv6Network("2001::/32"), 64, 0),  # Teredo's server, RFC 4380
    (IPv6Network("2001::/32"), 0, 0xFFFFFFFF),  # Teredo's client
)
#: ISATAP (RFC 5214) embeds an IPv4 address in an address of any network, after these 32 bits.
_ISATAP = {0x00005EFE, 0x02005EFE}
_KINDS = (
    ("is_unspecified", "unspecified"),
    ("is_loopback", "loopback"),
    ("is_link_local", "link-local"),
    ("is_multicast", "multicast"),
    ("is_private", "private"),
    ("is_reserved", "reserved"),
)

#: Printable ASCII: other characters have to be percent-encoded, other host names in `xn--` form.
_PRINTABLE = re.compile(r"[!-~]+")
#: Forms that the C library accepts as an IPv4 address in addition to four decimal numbers: `127.1`,
#: `0x7f000001`, `017700000001`.
_NUMBER = re.compile(r"(?:0[xX][0-9a-fA-F]*|\d+)")
_DOTTED = re.compile(r"(?:(?:0|[1-9]\d{0,2})\.){3}(?:0|[1-9]\d{0,2})")
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
MAX_HOST = 253


def refusal(address: IPAddress, allow_private: bool = False) -> str | None:
    """Return why nothing may be sent to `address`; None if it is public, or with `allow_private` if
    it is not a cloud metadata address.
    """
    inner: list[str | None] = []
    if isinstance(address, IPv6Address):
        inner = [refusal(item, allow_private) for item in embedded(address)]
        if METADATA in inner:
            return METADATA
        if address in _NAT64:
            return inner[0]
    if address in _METADATA:
        return METADATA
    if allow_private:
        return None
    for kind, what in _KINDS:
        if getattr(address, kind):
            return what
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "link-local"
    for network, what in _EXTRA.items():
        if address in network:
            return what
    public = address.is_global if isinstance(address, IPv4Address) else address in _GLOBAL_V6
    return next((why for why in inner if why), None) if public else "not public"


def embedded(address: IPv6Address) -> list[IPv4Address]:
    """Return the IPv4 addresses embedded in an IPv6 address: its packets may be forwarded there."""
    value = int(address)
    result = [
        ((value >> shift) ^ mask) & 0xFFFFFFFF
        for network, shift, mask in _EMBEDDING
        if address in network
    ]
    if (value >> 32) & 0xFFFFFFFF in _ISATAP:
        result.append(value & 0xFFFFFFFF)
    return [IPv4Address(item) for item in result]


def url_fault(url: str, allow_private: bool) -> str | None:
    """Return what is wrong with a receiver's URL as it is written; None if nothing is.

    Names are not looked up here. `allow_private`: the setting `webhook_allow_private`.
    """
    if not _PRINTABLE.fullmatch(url) or "\\" in url:
        return (
            "must consist of printable ASCII: percent-encode other characters, write host "
            "names as xn--…"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"is not a URL: {error}"
    if parts.scheme not in ("http", "https"):
        return f"scheme {parts.scheme or 'missing'}: must be http or https"
    if "@" in parts.netloc:
        return "must not contain a user name or password: everyone who can see the job sees it"
    if "#" in url:
        return "must not have a fragment: it is never sent"
    if port == 0:
        return "port 0 is not valid"
    return _host_fault(parts.netloc, parts.hostname or "", allow_private)


def _host_fault(netloc: str, host: str, allow_private: bool) -> str | None:
    if netloc.startswith("["):
        try:
            address: IPAddress = IPv6Address(host)
        except ValueError:
            return f"[{host}] is not an IPv6 address"
        why = refusal(address, allow_private)
    elif _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        if not _DOTTED.fullmatch(host):
            return f"{host!r} is not a host: write an IPv4 address as four decimal numbers"
        try:
            why = refusal(ip_address(host), allow_private)
        except ValueError:
            return f"{host!r} is not an IPv4 address"
    else:
        if not _HOST.fullmatch(host) or len(host) > MAX_HOST:
            return f"{host!r} is not a host name"
        bare = host.rstrip(".")
        why = "loopback" if bare == "localhost" or bare.endswith(".localhost") else None
    if why == METADATA:
        return f"{host} is {why}: always blocked"
    if why is None or allow_private:
        return None
    return f"{host} is {why}: blocked (SSRF protection, setting webhook_allow_private)"
