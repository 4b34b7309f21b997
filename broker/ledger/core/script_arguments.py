"""Arguments of Lua scripts: one map in MessagePack, which `lua/shared/arguments.lua` reads."""

from typing import Any

import msgspec


def pack(at: float, **own: Any) -> list[bytes]:
    """Return ARGV of a script: `at`, the time in seconds since the epoch, and its own arguments.

    None is omitted, which reads as nil in Lua. Bytes inside lists need `binary`.
    """
    values = {
        name: binary(value) if isinstance(value, bytes) else value
        for name, value in own.items()
        if value is not None
    }
    return [msgspec.msgpack.encode({"at": repr(at), **values})]


def binary(data: bytes) -> msgspec.Raw:
    """Return bytes as a MessagePack string: Lua's cmsgpack knows no binary type, and its strings
    are bytes.
    """
    return msgspec.Raw(b"\xdb" + len(data).to_bytes(4, "big") + data)
