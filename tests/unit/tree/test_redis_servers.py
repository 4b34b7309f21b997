"""Do the Makefile and docs/redis.md name the servers that the tests can run with?"""

import re

import pytest
import redis_servers
from tree import ROOT


def test_the_makefile_runs_every_server_but_the_default() -> None:
    (names,) = re.findall(r"^REDIS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert names.split() == [name for name in redis_servers.SERVERS if name != "valkey-8.1"]


def test_the_page_on_redis_lists_every_tested_server() -> None:
    rows = re.findall(
        r"^\| `((?:redis|valkey)-[\d.]+)`", (ROOT / "docs/redis.md").read_text(), re.M
    )
    assert rows == list(redis_servers.SERVERS)


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ({"redis_version": "8.2.3"}, "redis-8.2"),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.8"}, "valkey-8.1"),
    ],
)
def test_a_server_is_named_by_its_own_version(info: dict[str, str], name: str) -> None:
    assert redis_servers.name_of(info) == name


def test_an_unknown_server_is_refused_with_the_names() -> None:
    with pytest.raises(SystemExit, match=r"'redis-5' .* valid: redis-6\.2, "):
        redis_servers.prepare("redis-5")
