"""The Makefile names the servers that the tests can run with."""

import re

import redis_servers
from tree import ROOT


def test_the_makefile_runs_every_server_but_the_default() -> None:
    (names,) = re.findall(r"^REDIS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert names.split() == [name for name in redis_servers.SERVERS if name != "valkey-8.1"]
