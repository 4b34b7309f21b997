"""Bounds how many wrong keys one address may send, at the login and in `Authorization`.

A valid key is never counted or refused. Keys cannot be guessed; this bounds the cost of attempts,
and logs where they come from.
"""

import ipaddress
import logging
import time

from ...schemas.base.errors import MidstreamError
from ...schemas.base.recent import Recent

log = logging.getLogger(__name__)

#: Wrong keys that one address may send to each process within a minute.
WRONG_PER_MINUTE = 30
MINUTE_S = 60.0
#: Addresses that a process remembers; those that began longest ago are dropped.
REMEMBERED = 10_000
#: Prefix length of the IPv6 network that counts as one client.
IPV6_NETWORK = 64


def network_of(address: str) -> str:
    """Return what is counted as one client: an IPv4 address, or the network of an IPv6 address."""
    try:
        result = ipaddress.ip_address(address)
    except ValueError:
        return address[:100]
    if isinstance(result, ipaddress.IPv6Address) and result.ipv4_mapped is None:
        return str(ipaddress.ip_network((result.packed, IPV6_NETWORK), strict=False))
    return str(getattr(result, "ipv4_mapped", None) or result)


class WrongKeys:
    """The wrong keys of the last minute, by address."""

    def __init__(self) -> None:
        # network → when its minute ends, and wrong keys in it
        self._tried = Recent[str, tuple[float, int]](REMEMBERED)

    def count(self, address: str) -> None:
        """Count a wrong key. Raises `rate_limited` with the wait beyond `WRONG_PER_MINUTE`."""
        name = network_of(address)
        at = time.monotonic()
        until, tried = self._tried.get(name, (0.0, 0))
        if at >= until:
            until = at + MINUTE_S
            tried = 0
        self._tried[name] = until, tried + 1
        if tried < WRONG_PER_MINUTE:
            return
        if tried == WRONG_PER_MINUTE:
            log.warning("more than %d wrong keys from %s within a minute", WRONG_PER_MINUTE, name)
        wait = int(until - at) + 1
        raise MidstreamError(
            "rate_limited",
            f"more than {WRONG_PER_MINUTE} wrong keys from this address within a minute",
            hint=f"wait {wait} s, or use a valid key",
            retry_after=wait,
        )
