"""A dictionary of bounded size, for what may be computed or read again."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """The last `most` entries that were set, or moved to the end."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)

    def all_of(self, keys: Iterable[K], read: Callable[[], Mapping[K, V]]) -> Mapping[K, V]:
        """Return the values of these keys: what `read` returns, unless all of them are here."""
        wanted = {*keys}
        if self.keys() >= wanted:
            return {key: self[key] for key in wanted}
        found = read()
        self.update(found)
        return found
