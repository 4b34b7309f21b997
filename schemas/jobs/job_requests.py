"""The request that a job came from, for those who look at it and want to send it again."""

from typing import Any

from ..base.records import Record

#: Bytes of a body that is kept next to its job; of a larger one (vectors, long prompts) only the
#: prompts are.
MAX_KEPT_BODY = 16 << 10
#: Prompts that are shown, and characters of each.
SHOWN_PROMPTS, SHOWN_PROMPT = 100, 4000


class ShownPrompt(Record):
    text: str | None  # null: it was sent as token ids; longer ones are cut
    tokens: int


class JobRequestView(Record):
    """Answer of `GET /v1/jobs/{id}/request`."""

    id: str
    path: str | None  # where it was sent; null: it is part of a harvest
    #: As it was sent, with modules of its URL in `steering`; null: it was larger than 16 KiB, or an
    #: older server accepted the job.
    body: dict[str, Any] | None
    prompts: list[ShownPrompt]  # the first 100
    prompts_total: int
