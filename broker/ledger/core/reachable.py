"""What a caller is told of a Redis that cannot be used now."""

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import redis.exceptions

from ....schemas.base.errors import KindError
from ...redis_service import availability

P = ParamSpec("P")
T = TypeVar("T")


class Unreachable(KindError):
    """Redis is unreachable, loading or full, which passes."""

    KIND = "unavailable"


def reachable(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Decorate `call` to raise Unreachable for a Redis that cannot be used now."""

    @functools.wraps(call)
    async def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except redis.exceptions.RedisError as error:
            if not availability.is_redis_unavailable(error):
                raise
            raise Unreachable(availability.detail_of(error)) from error

    return guarded
