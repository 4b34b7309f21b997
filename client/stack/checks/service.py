"""The service that `midstream doctor` examines."""

from dataclasses import dataclass
from functools import cached_property

import httpx2

from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.settings import Settings
from ...sdk import wire
from .finding import TIMEOUT_S


@dataclass
class Service:
    """Where the parts of a service are."""

    settings: Settings
    redis_url: str  # empty: not configured
    url: str

    @cached_property
    def headers(self) -> dict[str, str]:
        return wire.headers(self.settings.api_key)

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx2.Response:
        """Call the API, by default with the settings' key. Raises MidstreamError if there is no
        answer.
        """
        sent = self.headers if headers is None else headers
        with Translated(
            httpx2.HTTPError,
            lambda error: MidstreamError("unavailable", f"no answer from {self.url}: {error}"),
        ):
            return httpx2.get(f"{self.url}{path}", headers=sent, timeout=TIMEOUT_S)
