"""Resolution of gradient rows: a capture with `of` = `gradient`, which the model's gradient worker
runs; and whether there is such a worker.
"""

from collections.abc import Mapping

import msgspec

from midstream.api.resolve.positions.captures import (
    Bounds,
    at_field,
    positions_of_each,
    stored_captures,
)
from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.resolve.readings.lens import single_tokens
from midstream.api.resolve.readings.saes import named_sae
from midstream.broker.ledger.named.probes import misfit
from midstream.schemas.artifacts.probes import PROBES, Probe
from midstream.schemas.artifacts.saes import Sae
from midstream.schemas.base.errors import MidstreamError, invalid
from midstream.schemas.jobs.models import GradientInfo, ModelInfo
from midstream.schemas.prompts.selectors import PositionSelector, select
from midstream.schemas.requests.scalars import SCALAR_FIELDS, ScalarSpec, StoredScalar
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture

START = "start one: `midstream up --set gradients=true`"


def check_gradients(
    hooks: Mapping[str, str],
    model: ModelInfo,
    gradients: GradientInfo | None,
    steered: bool = False,
    field: str = "model",
) -> GradientInfo:
    """Check that the model's gradient workers can serve `hooks` (field of the body → hook).

    Raises MidstreamError: a 400, `unavailable` while the model is being replaced, or `conflict`
    under global steering (`steered`).
    """
    if gradients is None:
        raise invalid(field, f"no gradient worker has served {model.name!r} yet", hint=START)
    if not gradients.fits(model):
        raise MidstreamError(
            "unavailable",
            f"the vLLM workers and the gradient workers of {model.name!r} were started with "
            "different models",
            field=field,
            hint="retry when both have been started with the same model",
        )
    if gradients.refused:
        raise invalid(field, f"gradients of {model.name!r} are not served: {gradients.refused}")
    for at, hook in hooks.items():
        if hook in gradients.absent:
            raise invalid(at, f"no gradients at {hook}: {gradients.absent[hook]}")
    if steered:
        raise MidstreamError(
            "conflict",
            f"global steering edits {model.name!r}, and gradients are computed without it",
            hint="clear global steering first",
        )
    return gradients


def _scalar(spec: CaptureSpec, bounds: Bounds, at: str) -> tuple[ScalarSpec, Probe | Sae | None]:
    """Return the scalar, and the artifact that it names.

    Raises a 400 naming the field below `at`, also for a scalar with fields of another kind.
    """
    model = bounds.model
    scalar = spec.scalar
    if scalar is None:
        raise invalid(at, "is required with of = 'gradient'", allowed=", ".join(SCALAR_FIELDS))
    needed, optional = SCALAR_FIELDS[scalar.kind]
    for name, value in msgspec.structs.asdict(scalar).items():
        if name in needed and value is None:
            raise invalid(f"{at}.{name}", f"is required for {scalar.kind!r}")
        if value is not None and name not in ("kind", *needed, *optional):
            raise invalid(
                f"{at}.{name}",
                f"is not valid for {scalar.kind!r}",
                allowed=", ".join((*needed, *optional)),
            )
    if scalar.probe is not None:
        probe = bounds.found.known(PROBES, scalar.probe, f"{at}.probe")
        if (why := misfit(probe, model)) is not None:
            raise invalid(f"{at}.probe", f"{scalar.probe!r} {why}", hint="register it again")
        _check_below(f"{at}.label", scalar.label, len(probe.content.labels))
        return scalar, probe
    if scalar.sae is not None:
        sae = named_sae(scalar.sae, f"{at}.sae", model, bounds.found)
        _check_below(f"{at}.feature", scalar.feature, sae.form.d_sae)
        return scalar, sae
    return scalar, None


def _check_below(at: str, number: int | None, count: int) -> None:
    if number is not None and number >= count:
        raise invalid(at, f"{number} does not exist", allowed=f"0 to {count - 1}")


async def with_scalar_tokens(spec: CaptureSpec, codec: Codec) -> CaptureSpec:
    """Return the capture with token ids in place of texts in its scalar."""
    if (scalar := spec.scalar) is None:
        return spec
    given = {"token": scalar.token, "foil": scalar.foil}
    named = {f"capture.scalar.{name}": token for name, token in given.items() if token is not None}
    ids = await single_tokens(named, codec)
    fields = {field.rpartition(".")[2]: token for field, token in ids.items()}
    return msgspec.structs.replace(spec, scalar=msgspec.structs.replace(scalar, **fields))


def resolve_gradients(spec: CaptureSpec, bounds: Bounds, at: str) -> list[StoredCapture]:
    """Return one capture per prompt. Raises a 400 naming the field below `at`."""
    facts = check_gradients({}, bounds.model, bounds.found.gradients, field=f"{at}.of")
    scalar, artifact = _scalar(spec, bounds, f"{at}.scalar")
    if spec.run is not None:
        raise invalid(f"{at}.run", "a source run has activations", hint="omit it")
    plain = msgspec.structs.replace(spec, of="activation", scalar=None)
    captures = stored_captures(plain, bounds, at)
    if captures[0].window is not None:
        raise invalid(f"{at}.positions", "gradients are those of the prompt: name its positions")
    for hook in captures[0].sites:
        if hook in facts.absent:
            raise invalid(f"{at}.hooks", f"{hook} has no gradients: {facts.absent[hook]}")
    for index, capture in enumerate(captures):
        _in_prompt(capture.positions, index, bounds, at)
    scalars = _scalars(scalar, artifact, bounds, f"{at}.scalar")
    return [
        msgspec.structs.replace(capture, gradient=scalar)
        for capture, scalar in zip(captures, scalars, strict=True)
    ]


def _in_prompt(chosen: PositionSelector, index: int, bounds: Bounds, at: str) -> list[int]:
    """Return the positions in prompt `index`. Raises a 400 if there are none."""
    tokens = bounds.prompts[index].tokens
    if not (positions := list(select(chosen, 0, tokens, tokens))):
        detail = f"selects no token of prompt {index}, and nothing is generated"
        raise invalid(f"{at}.positions", detail)
    return positions


def _scalars(
    scalar: ScalarSpec, artifact: Probe | Sae | None, bounds: Bounds, at: str
) -> list[StoredScalar]:
    """Return the scalar of each prompt."""
    for name in ("token", "foil"):
        _check_below(f"{at}.{name}", getattr(scalar, name), bounds.model.vocab_size)
    positions: list[list[int]] = [[] for _ in bounds.prompts]
    if scalar.kind != "logit":
        default = "all_prompt" if scalar.kind == "loss" else "last_prompt"
        given = msgspec.structs.replace(scalar, positions=scalar.positions or default)
        with at_field(f"{at}.positions"):
            of_each = positions_of_each(given, bounds)
        for index, chosen in enumerate(of_each):
            positions[index] = _in_prompt(chosen, index, bounds, at)
    if scalar.kind == "loss":  # the first token is given, not predicted
        positions = [[position for position in chosen if position] for chosen in positions]
        if not all(positions):
            raise invalid(f"{at}.positions", "selects no token after a prompt's first")
    stored = StoredScalar(
        kind=scalar.kind,
        token=scalar.token if isinstance(scalar.token, int) else 0,
        foil=scalar.foil if isinstance(scalar.foil, int) else None,
        probe=artifact.stored("none") if isinstance(artifact, Probe) else None,
        label=scalar.label or 0,
        sae=artifact.stored() if isinstance(artifact, Sae) else None,
        feature=scalar.feature or 0,
    )
    return [msgspec.structs.replace(stored, positions=chosen) for chosen in positions]
