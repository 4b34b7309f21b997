"""An artifact store in memory that keeps the protocol as object storage would.

Keys have no folders, complete objects are never appended to, a segment takes one group, and what is
open shows what was there then.
"""

import threading
from collections.abc import Sequence
from typing import Any

from midstream.schemas.jobs.captures import index_of
from midstream.storage.store import Buffer, check_key


class MemoryStore:
    uri = "memory://"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._marks: set[str] = set()
        self._turn = threading.RLock()

    def prepare(self) -> None: ...

    def trouble(self) -> str:
        return ""

    def used(self) -> int:
        return sum(map(len, list(self.objects.values())))

    def writer(self) -> "MemoryWriter":
        return MemoryWriter(self)

    def segment(self, key: str) -> "MemorySegment":
        return MemorySegment(self, key)

    def open(self, key: str, hold: bool = True) -> "MemoryHandle":
        self.check(key)
        try:
            return MemoryHandle(self.objects[key])
        except KeyError:
            raise FileNotFoundError(key) from None

    def stat(self, key: str) -> int:
        return self.open(key).size

    def children(self, folder: str = "") -> list[str]:
        below = [
            key.removeprefix(folder).partition("/")
            for key in list(self.objects)
            if key.startswith(folder)
        ]
        return sorted({folder + name + slash for name, slash, _ in below})

    def check(self, key: str) -> None:
        check_key(key)

    def link(self, key: str) -> None:
        return None

    def delete(self, key: str) -> None:
        for each in [
            each
            for each in list(self.objects)
            if each == key or (key.endswith("/") and each.startswith(key))
        ]:
            self.objects.pop(each, None)

    def erase(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        with self._turn:
            erased = bytearray(self.open(key).view())
            for offset, length in ranges:
                erased[offset : offset + length] = bytes(length)
            self.objects[key] = bytes(erased)
        return True

    def sealed(self, key: str) -> bool:
        return True

    def mark(self, name: str) -> None:
        self._marks.add(name)

    def unmark(self, name: str) -> None:
        self._marks.discard(name)

    def marked(self, name: str) -> bool:
        return name in self._marks

    def marks(self) -> list[str]:
        return sorted(self._marks)


class MemoryHandle:
    def __init__(self, content: bytes) -> None:
        self._content, self.size, self.stamp = content, len(content), ""

    def read(self, start: int, count: int) -> bytes:
        return self._content[start : start + count]

    def view(self) -> memoryview:
        return memoryview(self._content)

    def close(self) -> None: ...

    def __enter__(self) -> "MemoryHandle":
        return self

    def __exit__(self, *_: Any) -> None: ...


class MemoryWriter:
    def __init__(self, store: MemoryStore) -> None:
        self._store, self._parts = store, dict[str, list[bytes]]()

    def append(self, key: str, buffers: Sequence[Buffer]) -> None:
        self._store.check(key)
        self._parts.setdefault(key, []).extend(map(bytes, buffers))

    def commit(self) -> None:
        self._store.objects |= {key: b"".join(parts) for key, parts in self._parts.items()}
        self._parts.clear()

    def abort(self) -> None:
        self._parts.clear()


class MemorySegment:
    size = 0

    def __init__(self, store: MemoryStore, key: str) -> None:
        store.check(key)
        self._store, self.key, self.usable = store, key, True

    def append(self, data: Sequence[Buffer], index: bytes) -> None:
        assert self.usable, "the object is complete"
        self.usable = False
        self._store.objects[self.key] = b"".join(map(bytes, data))
        self._store.objects[index_of(self.key)] = index

    def close(self) -> None:
        self.usable = False
