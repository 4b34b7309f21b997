"""Rules on vLLM's configuration: a setting, its valid values, and why other values are refused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm.config import VllmConfig


@dataclass(frozen=True)
class Rule:
    """One setting. `name`: its path in `VllmConfig`, unless `read` says how to get it."""

    name: str
    valid: tuple[Any, ...]
    why: str  # why other values are refused
    read: Callable[[VllmConfig], Any] | None = None
    since: str = ""  # first vLLM version with the setting; empty: all versions in `seams.WINDOW`

    def value(self, config: VllmConfig) -> Any:
        """Return the setting's value; a valid value if its section of the config is None.

        Raises AttributeError if this vLLM does not have the setting.
        """
        if self.read is not None:
            return self.read(config)
        value: Any = config
        for name in self.name.split("."):
            if value is None:
                return self.valid[0]
            value = getattr(value, name)
        return value

    def refusal(self, config: VllmConfig, vllm: str = "this vLLM") -> str:
        """Return a clause that names the setting and its valid values; empty if its value is valid.

        `vllm`: how the clause refers to this vLLM, if it does not have the setting.
        """
        try:
            value = self.value(config)
        except AttributeError:
            return f"{self.name} is not a setting of {vllm}"
        if is_one_of(value, self.valid):
            return ""
        valid = ", ".join(map(_shown, self.valid))
        return f"{self.name} is {_shown(value)}, valid: {valid} ({self.why})"


def is_one_of(value: Any, valid: Iterable[Any]) -> bool:
    """Return whether `value` is among `valid`, where True is not 1."""
    return any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in valid
    )


def _shown(value: Any) -> str:
    """Return a short text for a value, even for a whole section of the configuration."""
    if isinstance(value, Enum):
        return value.name
    return (
        repr(value)
        if isinstance(value, str | int | float | list | dict | None)
        else f"a {type(value).__name__}"
    )
