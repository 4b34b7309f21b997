"""Has every key the type that docs/reference/redis.md says?

(That all families are there is in `tests/unit/broker/test_redis_keys.py`.)
"""

import re

from redis_keys import documented
from tree import ROOT, part_of, tracked

TYPES = {
    "hash": "hset hget hdel hgetall hincrby hmget hexists hlen hsetnx hkeys hvals hscan",
    "set": "sadd srem sismember smembers scard",
    "zset": "zadd zrem zscore zrange zcard zrangebyscore zrevrange zremrangebyscore zpopmin",
    "string": "set get mget incr",
    "list": "lpush rpush ltrim lrange",
    "stream": "xadd xrange xread xrevrange",
}
TYPE_OF = {command: kind for kind, commands in TYPES.items() for command in commands.split()}
#: A command, and the key it is given: `call('HSET', key('job', id)`, `redis.hget(f"ms:job:…"`.
USES = re.compile(r"""\b(\w+)(?:'\s*,|\()\s*(?:(?:key|turn)\('|f?["']ms:)([a-z-]+)""")
#: A name for a key: `local hash = key('job', id)`, `MODELS = "ms:models"`.
NAMES = re.compile(
    r"""^(?:local )?(\w+)\s*=\s*(?:(?:key|turn)\('|f?["']ms:)([a-z-]+)""", re.MULTILINE
)


def used(text: str) -> set[tuple[str, str]]:
    """Family and type of each key that a file gives to a command, by itself or by a name."""
    found = {(family, command.lower()) for command, family in USES.findall(text)}
    for name, family in NAMES.findall(text):
        named = re.findall(rf"""\b(\w+)(?:'\s*,|\()\s*{name}\b""", text)
        found |= {(family, command.lower()) for command in named}
    return {(family, TYPE_OF[command]) for family, command in found if command in TYPE_OF}


def test_keys_have_the_types_that_the_page_says() -> None:
    types = documented()
    sources = [path for path in tracked() if part_of(path)]
    found = {
        (family, kind, str(path))
        for path in sources
        if path.suffix in (".py", ".lua")
        for family, kind in used((ROOT / path).read_text())
    }
    assert {use for use in found if use[1] != types.get(use[0])} == set()
    seen = {family for family, *_ in found}
    assert len(seen) > 0.7 * len(types), sorted(types.keys() - seen)
