"""Resolution of gradient rows: a capture with `of` = `gradient`, which the model's gradient worker
runs.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.named.probes import Probes, misfit
from ....schemas.artifacts.probes import Probe
from ....schemas.artifacts.saes import Sae
from ....schemas.base.errors import invalid
from ....schemas.jobs.models import ModelInfo
from ....schemas.prompts.selectors import PositionSelector, SelectorError, select
from ....schemas.requests.scalars import SCALAR_FIELDS, ScalarSpec, StoredScalar
from ....schemas.requests.specs import CaptureSpec, StoredCapture
from ..positions.captures import Bounds, positions_of_each, stored_captures
from ..prompts.tokenizer import Codec
from .lens import single_tokens
from .saes import named_sae


class GradientsOf(CaptureSpec, kw_only=True):
    """A capture of gradients whose probe or autoencoder, if it names one, is looked up."""

    artifact: Probe | Sae | None
    absent: dict[str, str]  # hook point without gradients → the reason


async def with_artifact(
    spec: CaptureSpec, field: str, model: ModelInfo, ledger: Ledger
) -> tuple[CaptureSpec, str]:
    """Return the capture with the artifact that its scalar names, and the artifact's digest.

    Raises a 400 naming the field below `field`, also for a scalar with fields of another kind.
    """
    facts = await ledger.gradients(model)
    if facts is None:
        raise invalid(
            f"{field}.of",
            f"no gradient worker of {model.name!r} has been started",
            hint="the operator starts one with the setting gradients=true of `midstream up`, or "
            "engine=gradients of a worker",
        )
    if facts.refused:
        raise invalid(f"{field}.of", f"{model.name!r} has no gradients: {facts.refused}")
    scalar, at = spec.scalar, f"{field}.scalar"
    if scalar is None:
        raise invalid(at, "is required with of = 'gradient'", allowed=", ".join(SCALAR_FIELDS))
    _check_fields(scalar, at)
    artifact: Probe | Sae | None = None
    if scalar.probe is not None:
        artifact = await Probes(ledger).known(
            model.name, scalar.probe, f"{at}.probe", "invalid_request"
        )
        if (why := misfit(artifact, model)) is not None:
            raise invalid(f"{at}.probe", f"{scalar.probe!r} {why}", hint="register it again")
        if (scalar.label or 0) >= len(artifact.content.labels):
            labels = f"0 to {len(artifact.content.labels) - 1}"
            raise invalid(f"{at}.label", f"{scalar.label} does not exist", allowed=labels)
    if scalar.sae is not None:
        artifact = await named_sae(scalar.sae, f"{at}.sae", model, ledger)
        if (scalar.feature or 0) >= artifact.form.d_sae:
            features = f"0 to {artifact.form.d_sae - 1}"
            raise invalid(f"{at}.feature", f"{scalar.feature} does not exist", allowed=features)
    digest = "" if artifact is None else artifact.digest
    fields = msgspec.structs.asdict(spec)
    return GradientsOf(**fields, artifact=artifact, absent=facts.absent), digest


def _check_fields(scalar: ScalarSpec, at: str) -> None:
    needed, optional = SCALAR_FIELDS[scalar.kind]
    for name in msgspec.structs.asdict(scalar):
        given = getattr(scalar, name) is not None
        if name in needed and not given:
            raise invalid(f"{at}.{name}", f"is required for {scalar.kind!r}")
        if given and name not in ("kind", *needed, *optional):
            valid = ", ".join((*needed, *optional))
            raise invalid(f"{at}.{name}", f"is not valid for {scalar.kind!r}", allowed=valid)


async def with_scalar_tokens(spec: CaptureSpec, codec: Codec) -> CaptureSpec:
    """Return the capture with token ids in place of texts in its scalar."""
    assert spec.scalar is not None, "with_artifact comes first"
    named = {
        f"capture.scalar.{name}": token
        for name in ("token", "foil")
        if (token := getattr(spec.scalar, name)) is not None
    }
    ids = await single_tokens(named, codec)
    fields = {field.rpartition(".")[2]: token for field, token in ids.items()}
    return msgspec.structs.replace(spec, scalar=msgspec.structs.replace(spec.scalar, **fields))


def resolve_gradients(spec: GradientsOf, bounds: Bounds, at: str) -> list[StoredCapture]:
    """Return one capture per prompt. Raises a 400 naming the field below `at`."""
    if spec.run is not None:
        raise invalid(f"{at}.run", "a source run has activations", hint="omit it")
    assert spec.scalar is not None
    for name in ("token", "foil"):
        token = getattr(spec.scalar, name)
        if token is not None and token >= bounds.model.vocab_size:
            size = f"0 to {bounds.model.vocab_size - 1}"
            raise invalid(f"{at}.scalar.{name}", f"{token} is no token id", allowed=size)
    plain = msgspec.structs.replace(spec, of="activation", scalar=None)
    captures = stored_captures(plain, bounds, at)
    for hook in captures[0].sites:
        if hook in spec.absent:
            raise invalid(f"{at}.hooks", f"{hook} has no gradients: {spec.absent[hook]}")
    for index, capture in enumerate(captures):
        _in_prompt(capture.positions, index, bounds, f"{at}.positions")
    scalars = _scalars(spec, bounds, f"{at}.scalar")
    return [
        msgspec.structs.replace(capture, gradient=scalar)
        for capture, scalar in zip(captures, scalars, strict=True)
    ]


def _in_prompt(chosen: PositionSelector, index: int, bounds: Bounds, at: str) -> list[int]:
    """Return the positions in prompt `index`. Raises a 400 if there are none."""
    tokens = bounds.prompts[index].tokens
    if not (positions := list(select(chosen, 0, tokens, tokens))):
        raise invalid(at, f"selects no token of prompt {index}, and nothing is generated")
    return positions


def _scalars(spec: GradientsOf, bounds: Bounds, at: str) -> list[StoredScalar]:
    """Return the scalar of each prompt."""
    scalar, artifact = spec.scalar, spec.artifact
    assert scalar is not None
    positions: Sequence[list[int]] = [[] for _ in bounds.prompts]
    if scalar.kind != "logit":
        default = "all_prompt" if scalar.kind == "loss" else "last_prompt"
        given = msgspec.structs.replace(scalar, positions=scalar.positions or default)
        try:
            of_each = positions_of_each(given, bounds)
        except SelectorError as error:
            raise invalid(f"{at}.positions{error.at}", str(error)) from error
        positions = [
            _in_prompt(chosen, index, bounds, f"{at}.positions")
            for index, chosen in enumerate(of_each)
        ]
    if scalar.kind == "loss":  # the first token is given, not predicted
        positions = [[position for position in chosen if position] for chosen in positions]
        if not all(positions):
            raise invalid(f"{at}.positions", "selects no token after a prompt's first")
    fields: dict[str, Any] = {
        "kind": scalar.kind,
        "token": scalar.token or 0,
        "foil": scalar.foil,
        "probe": artifact.stored("none") if isinstance(artifact, Probe) else None,
        "label": scalar.label or 0,
        "sae": artifact.stored() if isinstance(artifact, Sae) else None,
        "feature": scalar.feature or 0,
    }
    return [StoredScalar(positions=chosen, **fields) for chosen in positions]
