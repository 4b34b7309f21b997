"""Resolution of installed readers (`readers`): name, sites, positions and options, checked against
what the model's ranks declare.
"""

import msgspec

from ....schemas.base.errors import invalid
from ....schemas.base.limits import MAX_READER_ARTIFACTS
from ....schemas.base.records import to_msgpack
from ....schemas.extensions import Extension, ReaderTerms, artifacts_named, checked_options
from ....schemas.model.banks import RESIDUAL, banks_of
from ....schemas.prompts.selectors import PositionSelector, SelectorError, Sites
from ....schemas.readings.installed import OptionValues, ReaderSpec, StoredReader
from ....schemas.requests.artifact_kinds import ARTIFACTS
from ..positions.captures import SITE_RULES, Bounds, Rules, apply_rules, recorded_of_each, sites_of


def _name(spec: ReaderSpec, bounds: Bounds) -> tuple[Extension, ReaderTerms]:
    extension = bounds.model.installed("reader", spec.name)
    assert extension.reader is not None, "as of every reader"
    return extension, extension.reader


def _options(spec: ReaderSpec, bounds: Bounds) -> OptionValues:
    """Return every declared option; one that the request omits has its default."""
    _, terms = _name(spec, bounds)
    options = checked_options(spec.name, terms.options, spec.options)
    for name in spec.options:
        if (kind := terms.options[name].artifact) and kind not in ARTIFACTS:
            raise SelectorError(f"no package that is installed here has {kind}", f".{name}")
    return options


def _whole_rows(spec: ReaderSpec, bounds: Bounds) -> Sites:
    """A reader gets whole rows, and those of one reading have one width."""
    sites = sites_of(spec, bounds)
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


RULES: Rules = (
    ("name", _name),
    *SITE_RULES,
    ("hooks", _whole_rows),
    ("positions", recorded_of_each),
    ("options", _options),
)


def resolve_reader(
    spec: ReaderSpec, bounds: Bounds, at: str
) -> tuple[StoredReader, Sites, list[PositionSelector]]:
    """Return what `readings.RULES` says. Raises a 400 naming the field below `at`."""
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
