"""Compile every Lua script in a real Redis, and look for negated arguments: `python
tools/check_lua.py`, a part of `make lint`.

Prints file, line and error of each.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs import ledger as jobs
from midstream.broker.queue import transport
from midstream_harvest.ledger import streams
from midstream_ops import redis_server
from midstream_review import ledger as review
from midstream_webhooks import outbox

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("broker/**/*.lua"), *ROOT.glob("packages/*/midstream_*/**/*.lua")])
#: A command's argument that may be -0, which Redis up to 7.0 takes for no integer. In another test
#: run than that of `make test-redis`, nothing would show it.
NEGATED = re.compile(r"redis\.call\(.*, -[a-z(]")


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of each script as it is sent."""
    yield from scripts.sources().items()
    yield from scripts.sources(outbox.LUA, outbox.PARTS).items()
    yield from scripts.sources(review.LUA, review.PARTS).items()
    yield from scripts.sources(streams.LUA).items()
    yield from (
        ("transport.TAKE", transport.TAKE),
        ("jobs.RESULT", jobs.RESULT),
    )


def place(text: str, line: int, name: str) -> str:
    """File and line of a line of a script's text, which is made of several files."""
    for path in FILES:
        part = path.read_text()
        before = text.count("\n", 0, at) if (at := text.find(part)) >= 0 else line
        if before < line <= before + part.count("\n"):
            return f"{path.relative_to(ROOT)}:{line - before}"
    return f"{name}:{line}"


def main() -> int:
    """The number of errors, each once however many scripts share it."""
    found = {
        f"{path.relative_to(ROOT)}:{number}: subtract from 0 instead: this may be -0"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NEGATED.search(line)
    }
    with tempfile.TemporaryDirectory(prefix="midstream-lua-") as folder:
        server = redis_server.start(Path(folder))
        try:
            with redis.Redis.from_url(server.url) as client:
                for name, text in sources():
                    try:
                        client.script_load(text)
                    except redis.ResponseError as error:
                        told = re.search(r"user_script:(\d+): (.*)", str(error))
                        found.add(
                            f"{place(text, int(told[1]), name)}: {told[2]}"
                            if told
                            else f"{name}: {error}"
                        )
        finally:
            server.kill()
    print(*sorted(found), sep="\n", end="\n" if found else "")
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
