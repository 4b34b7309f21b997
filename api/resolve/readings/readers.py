"""Resolution of installed readers (`readers`): name, sites, positions and options, checked against
what the model's ranks declare.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_READER_ARTIFACTS
from ....schemas.base.records import to_msgpack
from ....schemas.extensions import Extension, ReaderTerms, artifacts_named
from ....schemas.model.banks import RESIDUAL, banks_of
from ....schemas.prompts.selectors import Hook, PositionSelector, SelectorError, resolve_sites
from ....schemas.readings.installed import OptionValue, ReaderSpec, StoredReader
from ....schemas.requests.artifact_kinds import ARTIFACTS
from ..positions.captures import SITE_RULES, Bounds, apply_rules, positions_of_each


def _name(spec: ReaderSpec, bounds: Bounds) -> tuple[Extension, ReaderTerms]:
    installed = {
        extension.name: (extension, extension.reader)
        for extension in bounds.model.extensions
        if extension.kind == "reader" and extension.reader is not None
    }
    if spec.name not in installed:
        valid = (
            f"valid: {', '.join(sorted(installed))}"
            if installed
            else f"no readers are installed for {bounds.model.name} (setting extensions)"
        )
        raise SelectorError(f"unknown reader {spec.name!r}; {valid}")
    return installed[spec.name]


def _options(spec: ReaderSpec, bounds: Bounds) -> dict[str, OptionValue]:
    """Return every declared option; one that the request omits has its default."""
    _, terms = _name(spec, bounds)
    for name, value in spec.options.items():
        if name not in terms.options:
            raise SelectorError(
                f"unknown; valid options of {spec.name}: {', '.join(terms.options) or 'none'}",
                f".{name}",
            )
        try:
            terms.options[name].checked(value)
        except ValueError as error:
            raise SelectorError(str(error), f".{name}") from error
        if (kind := terms.options[name].artifact) and kind not in ARTIFACTS:
            raise SelectorError(f"no package that is installed here has {kind}", f".{name}")
    return {
        name: option.checked(spec.options.get(name, option.default))
        for name, option in terms.options.items()
    }


def _whole_rows(spec: ReaderSpec, bounds: Bounds) -> dict[Hook, list[int]]:
    """A reader gets whole rows, and those of one reading have one width."""
    sites = resolve_sites(
        spec.wanted, bounds.model.num_layers, bounds.model.hooks, bounds.model.absent
    )
    banks = banks_of(sites)
    if len(banks) > 1:
        listing = " | ".join(", ".join(sites) for sites in banks.values())
        raise ValueError(
            "rows of these hooks have different sizes: name them in "
            "readers of their own "
            f"({listing})"
        )
    if RESIDUAL not in banks and bounds.model.tp > 1:
        raise ValueError(
            f"rows of {', '.join(*banks.values())} are divided among {bounds.model.tp} "
            "ranks; valid: hooks of the stream"
        )
    return sites


RULES: tuple[tuple[str, Callable[[Any, Bounds], Any]], ...] = (
    ("name", _name),
    *SITE_RULES,
    ("hooks", _whole_rows),
    ("positions", positions_of_each),
    ("options", _options),
)


def resolve_reader(
    spec: ReaderSpec, bounds: Bounds, at: str
) -> tuple[StoredReader, dict[Hook, list[int]], list[PositionSelector]]:
    """Return what `ReadingRules.resolve` does. Raises a 400 naming the field below `at`."""
    made = apply_rules(RULES, spec, bounds, at)
    extension, terms = made["name"]
    artifacts = {
        option: bounds.found.known(kind, name, f"{at}.options.{option}")
        for option, (kind, name) in artifacts_named(spec, [extension])
    }
    size = len(to_msgpack(artifacts)) * len(bounds.prompts)  # each prompt has its own copy
    if size > MAX_READER_ARTIFACTS:
        raise invalid(
            f"{at}.options",
            f"what they name has {size} bytes for {len(bounds.prompts)} prompts",
            allowed=f"at most {MAX_READER_ARTIFACTS}",
        )
    reading = StoredReader(
        name=spec.name,
        digest=extension.digest,
        row_bytes=terms.size(made["options"]),
        fixed_bytes=terms.fixed_bytes,
        options=made["options"],
        contents={
            option: msgspec.to_builtins(record, builtin_types=(bytes,))
            for option, record in artifacts.items()
        },
    )
    return reading, made["hooks"], made["positions"]
