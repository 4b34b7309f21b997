"""Automatic pipelining: concurrent commands of a process reach Redis in few round trips.

A round trip costs a process several times what Redis spends on the command. So while `IN_FLIGHT`
groups are in flight, further commands collect and are sent as one group when an answer arrives: an
idle process never waits, a busy one groups automatically.
"""

import asyncio
import math
from typing import Any

import hiredis
import redis.asyncio
import redis.exceptions

#: Groups in flight: enough that one large answer does not hold up the others.
IN_FLIGHT = 3
#: Maximum number of commands in one group: Redis executes a group's commands in sequence,
#: interleaved with those of other clients.
GROUP_LIMIT = 64
#: Commands that are grouped: their answers are short, and they may be repeated if a connection
#: breaks, as the ledger's scripts may.
GROUPED = frozenset({"EVALSHA", "HGET", "HMGET"})
#: Bytes of a command, such as the acceptance of a job with many vectors, above which it is sent in
#: slices.
LARGE = 1 << 16
#: Bytes of a large command that are sent at a time; in between, the process does other things.
SLICE = 1 << 17

RedisCommand = tuple[tuple[Any, ...], "asyncio.Future[Any]"]


class PipelinedRedis(redis.asyncio.Redis):
    """redis-py's client, with short commands sent in groups. Belongs to one event loop.

    A cancelled caller does not get the answer; its command is executed nevertheless.
    """

    _waiting: list[RedisCommand]
    _in_flight: set["asyncio.Task[None]"]

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        if args[0] not in GROUPED:
            execute: Any = super().execute_command  # without types
            return await execute(*args, **options)
        if "_waiting" not in self.__dict__:
            self._waiting = []
            self._in_flight = set()
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((args, answer))
        if len(self._waiting) == 1 and len(self._in_flight) < IN_FLIGHT:
            asyncio.get_running_loop().call_soon(self._send_groups)
        return await answer

    def _send_groups(self) -> None:
        while self._waiting and len(self._in_flight) < IN_FLIGHT:
            group = self._waiting[:GROUP_LIMIT]
            self._waiting = self._waiting[GROUP_LIMIT:]
            task = asyncio.create_task(self._send_group(group))
            self._in_flight.add(task)
            task.add_done_callback(self._finished)

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._in_flight.discard(task)
        self._send_groups()

    async def _send_group(self, group: list[RedisCommand]) -> None:
        """Set every command's answer, or the error that it or the whole group caused."""
        answers: list[Any]
        try:
            pool: Any = self.connection_pool  # without types
            commands = [hiredis.pack_command(args) for args, _ in group]
            connection = await pool.get_connection()
            try:
                answers = await connection.retry.call_with_retry(
                    lambda: _exchange(connection, commands),
                    lambda _: connection.disconnect(nowait=True),
                )
            finally:
                await pool.release(connection)
        except Exception as error:
            answers = [error] * len(group)
        except asyncio.CancelledError:
            for _, answer in group:
                answer.cancel()
            raise
        for (_, answer), result in zip(group, answers, strict=True):
            if answer.done():  # its caller was cancelled
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)


async def _send(connection: Any, commands: list[bytes]) -> None:
    """Send large commands in slices, so that neither the process nor its memory is full of them.

    The slices of a command go over one connection: redis-py would open another one in between,
    where the rest of an argument, perhaps the text of a prompt, would be read as commands. An
    error or a cancellation closes the connection. Raises redis.ConnectionError.
    """
    if not any(len(command) > LARGE for command in commands):
        await connection.send_packed_command(commands)
        return
    begun = False
    try:
        for command in commands:
            for start in range(0, len(command), SLICE):
                if begun and not connection.is_connected:
                    raise redis.exceptions.ConnectionError(
                        "the connection was closed while a command was sent"
                    )
                await connection.send_packed_command(
                    [memoryview(command)[start : start + SLICE]], check_health=not begun
                )
                begun = True
                await asyncio.sleep(0)
    except BaseException:
        await connection.disconnect(nowait=True)
        raise


async def _exchange(connection: Any, commands: list[bytes]) -> list[Any]:
    """Send packed commands and read their answers, all within the connection's timeout.

    A failed command's answer is its error. This is redis-py's pipeline without the handling of
    commands that are not grouped here, which took half of the time.
    """
    answers: list[Any] = []
    await _send(connection, commands)
    try:
        async with asyncio.timeout(connection.socket_timeout):
            for _ in commands:
                try:
                    answers.append(await connection.read_response(timeout=math.inf))
                except redis.exceptions.ResponseError as error:
                    answers.append(error)
    except TimeoutError:
        # the connection is closed by then: unread answers must not be taken for those of later
        # commands
        raise redis.exceptions.TimeoutError(
            f"no answer from Redis within {connection.socket_timeout} s"
        ) from None
    return answers
