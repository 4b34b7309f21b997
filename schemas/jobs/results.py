"""The result of a job: what all kinds have, and a field for each kind that has its own."""

from typing import TYPE_CHECKING, Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from ..artifacts.loras import LoraUse
from ..artifacts.probes import ProbeResult
from ..base.edit_sizes import EditSizes
from ..base.records import Plotted
from ..base.states import State
from ..prompts.sites import renamed
from ..readings.readings import ReadingResults
from .job_kind import JobKind
from .jobs import CaptureResults, Determinism, Output
from .kinds import KINDS


class CommonResult(Plotted, ReadingResults):
    """Has what the results of all kinds have."""

    id: str
    model: str
    state: State
    outputs: list[Output]
    capture_results: CaptureResults
    determinism: Determinism | None  # null when nothing of the job was captured, steered or probed
    attempt: int
    layers: int | None = None  # that its prompts computed, from the first; null: the whole model
    lora: LoraUse | None = None  # the adapter that it ran with
    probes: list[ProbeResult] = []  # of its probes, and of its policies, with their decisions
    edits: list[EditSizes] = []  # of each prompt, hook and layer that was edited
    identity: str = ""  # of the model that computed it

    def as_asked(self) -> "JobResult":
        """Return the result with hook points under the names that the request gave them."""
        names = self.capture_results.hook_names
        return cast("JobResult", renamed(self, names) if names else self)


def _field(row: JobKind) -> tuple[str, Any, Any]:
    """Return the field of a kind: its name, its type, and what results of other kinds have."""
    absent = None if row.nullable else UNSET
    return row.name, row.load("result") | (None if row.nullable else UnsetType), absent


if TYPE_CHECKING:

    class JobResult(CommonResult):
        """Answer of `GET /v1/jobs/{id}/result`."""

        def __getattr__(self, name: str) -> Any:
            """Return the field of a kind."""

else:
    # a result of a kind that is not installed here is read without its field
    JobResult = msgspec.defstruct(
        "JobResult",
        [_field(row) for row in KINDS.values() if row.result],
        bases=(CommonResult,),
        module=__name__,
        namespace={"__doc__": "Answer of `GET /v1/jobs/{id}/result`."},
        forbid_unknown_fields=False,
        frozen=True,
        kw_only=True,
    )
