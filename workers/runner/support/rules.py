"""Rules on vLLM's configuration: a setting, its valid values, and why other values are refused."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from vllm.config import VllmConfig


@dataclass(frozen=True)
class SettingRule:
    """One setting. `name`: its path in `VllmConfig`, unless `read` says how to get it."""

    name: str
    why: str = ""  # why other values are refused; empty: they are unproven, which is a caveat
    valid: tuple[Any, ...] = (False,)
    read: Callable[[VllmConfig], Any] | None = None

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


class Verdict(NamedTuple):
    """Clauses that each name a setting of vLLM."""

    refused: list[str]
    unproven: list[str]


def judge(rules: Iterable[SettingRule], config: VllmConfig) -> Verdict:
    """Return which settings have refused or unproven values, with the valid ones."""
    verdict = Verdict([], [])
    for rule in rules:
        try:
            value = rule.value(config)
        except AttributeError:
            # what the rule forbids may have another name in this vLLM
            verdict.unproven.append(f"{rule.name} is not a setting of this vLLM")
            continue
        if is_one_of(value, rule.valid):
            continue
        clause = f"{rule.name} is {_shown(value)}, valid: {', '.join(map(_shown, rule.valid))}"
        if rule.why:
            verdict.refused.append(f"{clause} ({rule.why})")
        else:
            verdict.unproven.append(clause)
    return verdict


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
