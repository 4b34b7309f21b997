"""One small and one full value of everything that our processes send each other or keep in Redis,
the same on every machine.

`python tools/data/wire_samples.py` writes `tests/data/wire.json` anew; bytes that change are kept
there as those of a former version, which must stay readable.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shapes

from midstream.broker.receipts import frames
from midstream.broker.receipts.frames import FrameKind, Hello, Refusal
from midstream.schemas.access.audit import AuditEntry
from midstream.schemas.access.handling import Callback
from midstream.schemas.access.keys import StoredKey, Tenant
from midstream.schemas.access.sessions import Session
from midstream.schemas.access.webhooks import DeliveryAttempt
from midstream.schemas.artifacts.jacobian_lenses import JacobianLens
from midstream.schemas.artifacts.loras import Lora, LoraUse
from midstream.schemas.artifacts.probes import Probe
from midstream.schemas.artifacts.saes import Sae
from midstream.schemas.artifacts.tuned_lenses import TunedLens
from midstream.schemas.base.errors import Problem
from midstream.schemas.base.records import to_json, to_msgpack
from midstream.schemas.base.tensors import Tensor
from midstream.schemas.jobs.jobs import Event, Job, Output
from midstream.schemas.jobs.models import GradientInfo, ModelInfo, TokenizerBundle, WorkerInfo
from midstream.schemas.jobs.receipts import LostRange, Receipt
from midstream.schemas.prompts.selectors import Span
from midstream.schemas.readings.features import FeaturesPart
from midstream.schemas.readings.installed import ReaderPart
from midstream.schemas.readings.lens import LensPart
from midstream.schemas.requests.source_runs import RunFiles, RunRecord
from midstream.schemas.requests.specs import RankSpec
from midstream.schemas.requests.steering import Module, SteeringTemplate, WorkerSteering
from midstream.schemas.service.stored_schema import StoredSchema
from midstream_harvest.ledger.harvests import Out
from midstream_harvest.records.harvests import (
    CheckedFile,
    HarvestManifest,
    HarvestPlan,
    HarvestSource,
    HarvestWork,
    PartManifest,
    StoredHarvest,
    SurveyEntry,
    UnitEntry,
)
from midstream_harvest.records.work import HarvestPart, HarvestPlace
from midstream_lab.records.attributions import AttributionRequest
from midstream_lab.records.doses import DoseEffect, DoseResult, DoseWork
from midstream_lab.records.fits import FitResult, FitWork, LensFitResult
from midstream_lab.records.sweep_paths import SweepPath
from midstream_lab.records.sweep_units import SweepWork
from midstream_lab.records.sweeps import Neurons, SweepRequest, UnitRecord

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "wire.json"

#: What crosses a wire or lies in Redis, and how it is written there. What is inside of these need
#: not be named.
MSGPACK: tuple[Any, ...] = (
    Receipt,
    LostRange,
    Hello,
    Refusal,
    Job,
    SweepWork,
    HarvestWork,
    FitWork,
    DoseWork,
    Output,
    RankSpec,
    RunRecord,
    RunFiles,
    UnitRecord,
    FitResult,
    DoseResult,
    LensFitResult,
    Module,
    SteeringTemplate,
    WorkerSteering,
    Tensor,
    TokenizerBundle,
    StoredKey,
    Tenant,
    Lora,
    LensPart,
    FeaturesPart,
    ReaderPart,
    Probe,
    Sae,
    TunedLens,
    JacobianLens,
    StoredHarvest,
    UnitEntry,
    HarvestPlan,
    HarvestPlace,
    Session,
)
JSON: tuple[Any, ...] = (
    ModelInfo,
    GradientInfo,
    WorkerInfo,
    Event,
    Problem,
    Callback,
    DeliveryAttempt,
    LoraUse,
    Out,
    CheckedFile,
    PartManifest,
    HarvestManifest,
    SurveyEntry,
    SweepRequest,
    AttributionRequest,
    AuditEntry,
    StoredSchema,
)

#: Where a value is bound by more than its type.
CHOSEN: dict[tuple[str, str], Any] = {
    ("Tensor", "dtype"): "float32",
    ("Tensor", "shape"): [1, 2],
    ("Tensor", "data"): b"\0\0\x80?\0\0\0@",
    ("ReadArray", "dtype"): "float32",
    ("ReadArray", "shape"): [1, 2],
    ("ReadArray", "data"): b"\0\0\x80?\0\0\0@",
    ("StoredPolicy", "mode"): "shadow",
    ("Job", "kind"): "harvest",
    ("Job", "work"): HarvestWork(part=HarvestPart(harvest="text", part=3)).packed,
    ("StoredSteering", "positions"): [1, 2],
    ("Trigger", "text"): None,
    ("StoredCapture", "positions"): "last_prompt",
    ("SteeringTemplate", "positions"): "all_prompt",
    ("RunRecord", "name"): "source",
    ("Column", "places"): [(1, 2)],
    ("CaptureSpec", "hook"): None,
    ("CaptureSpec", "layers"): None,
    ("Condition", "window"): None,
    ("Condition", "aggregation"): "exponential",
    ("PolicyRequest", "share"): 0.0,
    ("PolicyRequest", "actions"): ["flag"],
    ("Sampling", "logprobs"): 2,
    ("TokenLogprob", "top"): [],
    ("Prompted", "logprobs"): [None],
    ("Sampling", "prompt_logprobs"): 2,
    ("ToolCall", "type"): "function",
    ("Session", "key"): "0123456789ab",
    ("Event", "data"): {"state": "running", "attempt": 1},
    ("SweepRequest", "neurons"): Neurons(top=[1, 4]),
    ("SweepRequest", "path"): SweepPath(receivers="logits"),
    ("AttributionRequest", "neurons"): Neurons(top=[1, 4]),
    ("AttributionRequest", "path"): SweepPath(receivers="logits"),
    ("HarvestPositions", "window"): Span(last=3),
    ("HarvestPositions", "spans"): [Span(role="assistant")],
    ("StoredCapture", "window"): Span(last=3),
    ("StoredDose", "effect"): DoseEffect(words=["yes"]),
    ("Roc", "fpr"): [0.0, 1.0],
    ("Roc", "tpr"): [0.5, 1.0],
    ("ScoreHistogram", "edges"): [0.0, 1.0],
    ("StoredHarvest", "source"): HarvestSource(path="corpus", field="body"),
}
TEXTS = {"name": "alpha", "tenant": "team", "id": "0123456789ab", "tag": "t", "sha256": "0" * 64}


def full(kind: Any) -> Any:
    """A value with every field set to something that is not its default, where its type has such a
    thing.
    """
    return _struct(kind, all_fields=True)


def small(kind: Any) -> Any:
    """A value with nothing but what must be there."""
    return _struct(kind, all_fields=False)


def _struct(kind: Any, all_fields: bool) -> Any:
    values = {}
    for field in shapes.type_info(kind).fields:  # type: ignore[union-attr]
        if field.required or all_fields:
            key = (kind.__name__, field.name)
            values[field.name] = (
                CHOSEN[key]
                if key in CHOSEN
                else _value(field.type, field.name, all_fields, field.default)
            )
    return kind(**values)


def _value(shape: Any, name: str, all_fields: bool, default: Any = msgspec.NODEFAULT) -> Any:
    match shape:
        case shapes.Metadata():
            return _value(shape.type, name, all_fields, default)
        case shapes.BoolType():
            return default is not True
        case shapes.IntType():
            return max(3, shape.ge or 0)
        case shapes.FloatType():
            return 0.5
        case shapes.StrType():
            return TEXTS.get(name, "text")
        case shapes.BytesType():
            return b"bytes"
        case shapes.AnyType():
            return "anything"
        case shapes.LiteralType():
            return next(value for value in reversed(shape.values) if value != default)
        case shapes.EnumType():
            return list(shape.cls)[-1]
        case shapes.ListType() | shapes.CollectionType() | shapes.VarTupleType():
            return [_value(shape.item_type, name, all_fields)]
        case shapes.TupleType():
            return tuple(_value(item, name, all_fields) for item in shape.item_types)
        case shapes.DictType():
            return {
                _value(shape.key_type, "key", all_fields): _value(
                    shape.value_type, name, all_fields
                )
            }
        case shapes.StructType():
            return _struct(shape.cls, all_fields)
        case shapes.UnionType():
            told = [one for one in shape.types if not isinstance(one, shapes.NoneType)]
            return _value(told[0], name, all_fields, default)
        case _:
            raise TypeError(f"{name}: no sample of {shape}")


@cache
def encoders() -> dict[str, tuple[Any, Callable[[Any], bytes]]]:
    """Name → what it is, and how it is written."""
    return {kind.__name__: (kind, to_msgpack) for kind in MSGPACK} | {
        kind.__name__: (kind, to_json) for kind in JSON
    }


@cache
def written() -> dict[str, dict[str, str]]:
    """What this version writes: name → {small, full}, as hex digits; of a frame, kind → its
    bytes.
    """
    found = {
        name: {"small": encode(small(kind)).hex(), "full": encode(full(kind)).hex()}
        for name, (kind, encode) in encoders().items()
    }
    epoch = "0123456789abcdef" * 2
    return found | {
        "Frame": {kind.name: frames.pack(kind, epoch, 7, b"payload").hex() for kind in FrameKind}
    }


def main() -> None:
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, now in written().items():
        entry = kept.setdefault(name, {"now": {}, "former": []})
        for size, raw in now.items():
            before = entry["now"].get(size)
            if before not in (None, raw) and before not in entry["former"]:
                entry["former"].append(before)
            entry["now"][size] = raw
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
