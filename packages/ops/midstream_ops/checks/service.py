"""The service that `midstream doctor` examines."""

from dataclasses import dataclass
from functools import cached_property

import httpx2

from midstream.client.sdk import wire
from midstream.schemas.base.errors import MidstreamError, Translated
from midstream.schemas.settings.settings import Settings

from .finding import TIMEOUT_S


@dataclass
class Service:
    """The settings and addresses of a service's parts."""

    settings: Settings
    redis_url: str  # empty: not configured
    url: str
    is_of_stack: bool = False  # the settings are those with which the stack on this machine runs
    redis_answers: bool = False  # as its check has found, also to writes

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

    @cached_property
    def missing(self) -> list[str]:
        """Return what the API lacks to run a job. Raises MidstreamError if there is no answer."""
        ready = self.get("/readyz")
        if ready.status_code == 200:
            return []
        return ready.json().get("missing") or [f"/readyz answers {ready.status_code}"]

    @property
    def without_redis(self) -> bool:
        """Return whether the API lacks Redis, which does not answer here either, or takes no
        writes.
        """
        return not self.redis_answers and any(what.startswith("redis") for what in self.missing)
