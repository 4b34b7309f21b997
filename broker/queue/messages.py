"""Templates of a job's Celery message and of the events of its tasks that the ledger sends, which
the Lua scripts fill in (`lua/shared/message.lua`).

Celery itself composes the message once, with placeholders; only what differs between jobs is filled
in. A test compares a message with the one that `send_task` would send. Nothing in it is specific to
a process: the scripts are the same text everywhere, so Redis caches each of them once.
"""

import json
import re
from typing import Any

from celery import Celery

from ...schemas.base.records import JsonObject
from .celery_app import task_of

# Redis keeps every script's text until it exits, so one text for each process would be a leak.
#: The sender; Celery has a process's name here. No replies are expected: there is no result
#: backend.
ORIGIN = "ledger@midstream"
#: Channels of events, without the event's name; Lua prepends kombu's prefix, which names the Redis
#: database.
TASK_CHANNELS = "celeryev/task."
#: Filled in by Lua: `@name@` is a string or a part of one, `"@#name@"` a number.
_PLACEHOLDER = re.compile(r'"@#(\w+)@"|@(\w+)@')


def job_of_task(task_id: str) -> tuple[str, int]:
    """Return (job id, attempts made when it was sent) of a task's id: the job's id, followed by the
    number of attempts if there were any.
    """
    job_id, _, attempts = task_id.partition(".")
    return job_id, int(attempts) if attempts.isdigit() else 0


def templates() -> dict[str, str]:
    """Return the Lua expressions `MESSAGE`, `SENT` and `ENDED`; they read `job`, `task`, `kind`,
    `queue`, `step`, `at`, and of an event `name` and `body`, from a Lua table `of`.
    """
    app = Celery("midstream", set_as_current=False)
    task = app.amqp.as_task_v2(
        "@task@",
        task_of("@kind@"),
        ["@job@"],
        {},
        origin=ORIGIN,
        reply_to="",
        create_sent_event=True,
        ignore_result=None,
    )
    route = {"exchange": "", "routing_key": "@queue@"}
    message = _envelope(
        task.body,
        task.headers,
        task.properties | {"delivery_mode": 2, "delivery_info": route, "priority": "@#step@"},
    )
    event = {
        "type": "task-sent",
        "hostname": ORIGIN,
        "pid": 0,
        "utcoffset": 0,
        "clock": 0,
        "timestamp": "@#at@",
    }
    route = {"exchange": "celeryev", "routing_key": "task.sent"}
    sent = _envelope(
        event | task.sent_event | {"queue": "@queue@", "exchange": "", "routing_key": "@queue@"},
        {"hostname": ORIGIN},
        {"delivery_mode": 1, "delivery_info": route, "priority": 0},
    )
    route = {"exchange": "celeryev", "routing_key": "task.@name@"}
    ended = _envelope(
        None, {"hostname": ORIGIN}, {"delivery_mode": 1, "delivery_info": route, "priority": 0}
    ) | {"body": "@#body@"}
    return {
        name: _expression(of)
        for name, of in (("MESSAGE", message), ("SENT", sent), ("ENDED", ended))
    }


def _envelope(body: Any, headers: JsonObject, properties: JsonObject) -> JsonObject:
    """Return a message in the format of kombu's Redis transport.

    The body is JSON text, which kombu does not decode (`body_encoding`).
    """
    return {
        # Text, because Lua has no base64.
        "body": _PLACEHOLDER.sub(lambda result: f"@{result[1] or result[2]}@", json.dumps(body)),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": properties | {"body_encoding": "utf-8", "delivery_tag": "@task@@@at@"},
    }


def _expression(template: JsonObject) -> str:
    """Return a Lua concatenation of the template's JSON and the values that are filled in."""
    parts = []
    end = 0
    text = json.dumps(template)
    for result in _PLACEHOLDER.finditer(text):
        parts += [f"[==[{text[end : result.start()]}]==]", f"of.{result[1] or result[2]}"]
        end = result.end()
    return " .. ".join([*parts, f"[==[{text[end:]}]==]"])
