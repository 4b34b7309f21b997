"""Rules on the `Host` and `Origin` headers that API and Flower accept: a browser must not be made to act for its user.

A page of anywhere can have its own name point at 127.0.0.1 (DNS rebinding): to the browser the API is of the page's origin then, and its
scripts may read and write everything. But the name by which the browser calls is told, in `Host`, and it is not one of ours. Without that
trick a page cannot read what we answer, and cannot send JSON (we allow no other origin to); it can send what has no body, and forms. Then
the browser tells whose page it is, in `Origin`.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from ..schemas.errors import MidstreamError
from ..schemas.settings import Settings, SettingsError, is_loopback

#: An address in brackets, or a name or address; and a port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{0,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(.+)", re.IGNORECASE)
#: These change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(header: str) -> str:
    """`name:port` without the port, in lower case, and an address without brackets; empty for what is no host."""
    match = _HOST.fullmatch(header)
    return match[1].strip("[]").lower() if match else ""


def named(settings: Settings) -> frozenset[str]:
    """What `allowed_hosts` names. Raises SettingsError for what is neither a name nor an address."""
    names = [name for name in map(str.strip, settings.allowed_hosts.split(",")) if name]
    for name in names:
        if not _is_address(name) and host_of(name) != name.lower():
            raise SettingsError(
                f"MIDSTREAM_ALLOWED_HOSTS: {name!r} is neither a host's name nor an address (allowed: midstream.example,10.0.0.7 and "
                "such, without scheme and port)"
            )
    return frozenset(name.lower() for name in names)


class Hosts:
    """Which `Host` and `Origin` headers are right. Loopback's always are: health checks and whoever works on the machine itself."""

    def __init__(self, settings: Settings, host: str, asks: bool) -> None:
        """`host`: where it listens. `asks`: callers need a key or a password, without which another page's script gets nothing.

        Raises SettingsError for an `allowed_hosts` that is none.
        """
        self._open = not asks
        self._any = not self._open and not settings.allowed_hosts
        ours = (host, urlsplit(settings.public_url).hostname or "")
        self._names = named(settings) | {name.lower() for name in ours if name}
        # Whoever listens elsewhere is called by its address (Prometheus finds containers by theirs), and an address cannot be made to
        # point at another one.
        self._addresses = not is_loopback(host)
        self._allowed = ", ".join(["localhost", "127.0.0.1", "[::1]", *(["any address"] if self._addresses else []), *sorted(self._names)])

    def allows(self, hosts: list[str]) -> bool:
        """Whether a call with these `Host` headers means us."""
        return self._any or (len(hosts) == 1 and self._ours(hosts[0]))

    def check(self, method: str, hosts: list[str], origins: list[str]) -> None:
        """Raises `misdirected` for another name than ours and, where everybody is let in, `cross_site` for a page of elsewhere
        that wants to change something."""
        if not self.allows(hosts):
            shown = ", ".join(hosts)[:200] or "(none)"
            raise MidstreamError(
                "misdirected", f"this API is not called {shown!r}; MIDSTREAM_ALLOWED_HOSTS names what it is called", field="Host",
                allowed=self._allowed,
            )  # fmt: skip
        if self._any:
            return
        if self._open and method not in SAFE and not all(self._our_page(origin, host_of(hosts[0])) for origin in origins):
            raise MidstreamError(
                "cross_site", f"a page of {', '.join(origins)[:200]!r} may change nothing here", field="Origin", allowed=self._allowed
            )

    def _our_page(self, origin: str, called: str) -> bool:
        """Of the name or address by which we are called, or of one that is certainly ours: pages of elsewhere have addresses, too."""
        match = _ORIGIN.fullmatch(origin)
        page = host_of(match[1]) if match is not None else ""
        return page != "" and (page == called or page in self._names or is_loopback(page))

    def _ours(self, header: str) -> bool:
        host = host_of(header)
        return host in self._names or is_loopback(host) or (self._addresses and _is_address(host))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
