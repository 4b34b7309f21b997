"""An API that asks for keys, and callers of it: what the tests of keys and tenants stand on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import redis
from edge import Api, Hand, running

from midstream.broker.ledger.people.keys import LedgerKeys, new_key
from midstream.schemas.access.keys import CreatedKey, KeyRequest

ADMIN = new_key()


@contextmanager
def asking(directory: Path, redis_url: str, **settings: Any) -> Iterator[Api]:
    """An API on loopback that asks for keys all the same."""
    with running(
        directory,
        redis_url,
        **{"auth": "keys", "admin_key": ADMIN, "lease_s": 300.0, "max_wait_s": 1.0} | settings,
    ) as api:
        yield api


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Caller:
    """Somebody with a key of a tenant."""

    def __init__(
        self, api: Api, hand: Hand, tenant: str, *scopes: str, expires_in: float | None = None
    ):
        self.api = api
        request = KeyRequest(
            name=f"of {tenant}",
            tenant=tenant,
            scopes=list(scopes or ("submit", "read")),
            expires_in=expires_in,
        )  # type: ignore[arg-type]
        self.key: CreatedKey = hand.do(LedgerKeys(hand.ledger).create(request))
        self.tenant = tenant
        self.http = httpx2.Client(base_url=api.url, headers=bearer(self.key.key), timeout=60)

    def submit(self, **body: Any) -> str:
        answer = self.http.post(
            "/v1/jobs", json={"model": "tiny", "prompts": ["hello there"], **body}
        )
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])


def flushed(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.flushall()
