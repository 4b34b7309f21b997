"""Checks the `Host` and `Origin` headers of API and Flower, against DNS rebinding and cross-site
requests.

A page can point its own name at 127.0.0.1 (DNS rebinding). The browser then treats the API as the
page's origin, and the page's scripts can read and write everything; but the browser sends that name
in `Host`, where it is not accepted. Without rebinding a page cannot read responses and cannot send
JSON (CORS allows no other origin); it can send forms and requests without a body. For these the
browser sends the page's origin in `Origin`.
"""

import ipaddress
import re
from urllib.parse import urlsplit

from ...schemas.base.errors import MidstreamError
from ...schemas.settings.settings import Settings, SettingsError, is_loopback

#: An address in brackets, or a name or address; and a port.
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\[\]]+)(:\d{0,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(.+)", re.IGNORECASE)
#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def host_of(header: str) -> str:
    """Return the host of `name:port`, in lower case, an address without brackets; empty if the
    header is invalid.
    """
    match = _HOST.fullmatch(header)
    return match[1].strip("[]").lower() if match else ""


def allowed_names(settings: Settings) -> frozenset[str]:
    """Return the entries of `allowed_hosts`.

    Raises SettingsError for an entry that is neither a name nor an address.
    """
    names = [name for name in map(str.strip, settings.allowed_hosts.split(",")) if name]
    for name in names:
        if not _is_address(name) and host_of(name) != name.lower():
            raise SettingsError(
                f"MIDSTREAM_ALLOWED_HOSTS: {name!r} is neither a host name nor an address; "
                "give names and addresses without a scheme or port, such as "
                "midstream.example,10.0.0.7"
            )
    return frozenset(name.lower() for name in names)


class Hosts:
    """The `Host` and `Origin` headers that are accepted.

    Those of loopback always are, for health checks and local users.
    """

    def __init__(self, settings: Settings, host: str, authenticates: bool) -> None:
        """`host`: the address on which the service listens.

        `authenticates`: callers need a key or a password, which another site's page does not have.

        Raises SettingsError for an invalid `allowed_hosts`.
        """
        self._open = not authenticates
        self._any = not self._open and not settings.allowed_hosts
        own = (host, urlsplit(settings.public_url).hostname or "")
        self._names = allowed_names(settings) | {name.lower() for name in own if name}
        # A service off loopback may be called by its address (Prometheus finds containers that
        # way), and no page can rebind an address.
        self._addresses = not is_loopback(host)
        names = {
            name
            for name in self._names
            if not (is_loopback(name) or (self._addresses and _is_address(name)))
        }
        shown = ["localhost", "127.0.0.1", "[::1]", *(["any address"] if self._addresses else [])]
        self._allowed = ", ".join(
            [*shown, *sorted(f"[{name}]" if ":" in name else name for name in names)]
        )

    def allows(self, hosts: list[str]) -> bool:
        """Return whether a call with these `Host` headers is meant for this service."""
        return self._any or (len(hosts) == 1 and self._ours(hosts[0]))

    def check(self, method: str, hosts: list[str], origins: list[str]) -> None:
        """Raise `misdirected` for a host that is not accepted and, without authentication,
        `cross_site` for a request from another site's page with a method outside `SAFE`.
        """
        if not self.allows(hosts):
            shown = ", ".join(hosts)[:200] or "(none)"
            raise MidstreamError(
                "misdirected",
                f"{shown!r} is not a host name of this API; add it to MIDSTREAM_ALLOWED_HOSTS",
                field="Host",
                allowed=self._allowed,
            )
        if self._any:
            return
        if (
            self._open
            and method not in SAFE
            and not all(self._our_page(origin, host_of(hosts[0])) for origin in origins)
        ):
            raise MidstreamError(
                "cross_site",
                f"a page from {', '.join(origins)[:200]!r} is not allowed to send this request",
                field="Origin",
                allowed=self._allowed,
            )

    def _our_page(self, origin: str, called: str) -> bool:
        """Return whether the page has the host of this call, or an accepted name.

        Other addresses do not count: other sites have addresses too.
        """
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
