"""The service that `midstream doctor` examines."""

from dataclasses import dataclass

import httpx2

from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.settings.settings import Settings
from ...sdk import wire
from .finding import TIMEOUT_S


@dataclass
class Service:
    """The settings and addresses of a service's parts."""

    settings: Settings
    redis_url: str  # empty: not configured
    url: str

    def get(self, path: str, *, keyed: bool = True) -> httpx2.Response:
        """Call the API, with the settings' key if `keyed`. Raises MidstreamError if there is no
        answer.
        """
        headers = wire.headers(self.settings.api_key) if keyed else {}
        with Translated(
            httpx2.HTTPError,
            lambda error: MidstreamError("unavailable", f"no answer from {self.url}: {error}"),
        ):
            return httpx2.get(f"{self.url}{path}", headers=headers, timeout=TIMEOUT_S)
