"""The request that created a job, for display and for sending it again."""

from ..base.records import JsonObject, Record

#: The most bytes of a body that is stored with its job; of a larger body (vectors, long prompts),
#: only the prompts are stored.
MAX_KEPT_BODY = 16 << 10
#: The most prompts that are shown, and the most characters of each.
SHOWN_PROMPTS = 100
SHOWN_PROMPT = 4000
#: An `Idempotency-Key` within its tenant, and the SHA-256 of the path and body of its request.
Idempotency = tuple[str, str]


class ShownPrompt(Record):
    text: str | None  # cut if it is too long; null: the prompt was sent as token ids
    tokens: int


class JobRequestView(Record):
    """Answer of `GET /v1/jobs/{id}/request`."""

    id: str
    path: str | None  # the endpoint; null: the job is part of a harvest
    #: The body as it was sent, with modules of its URL in `steering`; null: it was larger than 16
    #: KiB, or an older server accepted the job.
    body: JsonObject | None
    prompts: list[ShownPrompt]  # the first 100
    prompts_total: int
