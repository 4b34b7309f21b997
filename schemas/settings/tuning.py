"""The table `[tuning]` of the settings: sizes, caches, threads and times that fit most services."""

from typing import Annotated

import msgspec

from ..base.limits import MAX_POLICY_VECTORS, MAX_STEERING_ROWS
from ..base.records import Record

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


def global_share(size: int) -> int:
    """Return how much global steering may use where requests have `size`, which stays theirs."""
    return (size + 1) // 2


class Tuning(Record):
    """Each is set as `tuning.<name>`: in the table `[tuning]` of the file, by
    `--set tuning.<name>=`, or by `MIDSTREAM_TUNING_<NAME>` in the environment. The comments are the
    table of `docs/reference/settings.md`.
    """

    # Weights of sparse autoencoders, in float32, that each rank keeps loaded. A job whose
    # autoencoder does not fit waits until another job ends. Also the largest autoencoder of an
    # attribution or of gradient rows: a worker process loads one at a time for them
    sae_cache_mib: PositiveInt = 4096
    # Processor time (seconds) for compiling and trying the format of an answer:
    # `structured_outputs`, `response_format`, tools. Ordinary formats take a tenth of a second. A
    # format that takes too long is rejected with 400, before it reaches the engine
    format_compile_s: Positive = 10.0
    # Memory of the worker (GiB) that transformers' model may take for the comparison (`compare`),
    # in float32 and only at startup; at most half of the free memory. A model whose first layer
    # does not fit is not compared
    compare_memory_gib: Positive = 16.0
    # Seconds without a job after which a gradient worker drops its model from memory
    gradients_idle_s: Positive = 600.0
    # Capture two more CUDA graphs for each batch size: without hook sites, and with those of the
    # residual stream alone, for steps that need no others
    # (docs/capacity.md#three-graphs-for-each-size). `false`: one graph, and every step launches all
    # sites; steps cost more, rows and outputs stay the same. Only for finding out whether a fault
    # comes from the choice of a graph
    graph_families: bool = True
    # Maximum number of distinct steering configurations of requests in the engine. Further requests
    # wait; a request that needs more on its own is rejected. Global steering may use half as many
    # beside them, and policies 8. It should exceed `max_num_seqs`, so that the
    # next requests are already in the engine when the first ones end
    steering_rows: PositiveInt = 256
    # Maximum number of vectors of all those configurations: one for each entry, 2 r for a `lowrank`
    # of rank r, and one more for each distinct combination of entries that apply to one token at
    # one site. Beyond it, requests wait as for `tuning.steering_rows`. Global steering may use half
    # as many beside them, and policies 2,048
    steering_entries: PositiveInt = 8192
    # Steering vectors kept on the ranks after the end of their job. Vectors needed by a running job
    # are kept in any case
    vector_cache_mib: PositiveInt = 256
    # Memory per rank for the rows captured in one step, on accelerators. 0: sized from the model
    # (docs/decisions/0020-ring.md), at most 2 GiB. Prompts whose rows do not fit are computed in
    # several steps; a request waits while the rows of all requests' next tokens do not fit
    # together, and is rejected if the rows of its own next token do not fit
    capture_buffer_mib: Natural = 0
    # Memory per rank for captured rows that wait for the writers, for files, harvests and readings
    # each. 0: 512 MiB on CPUs; on a GPU, room for four full steps, but at least 512 MiB and at most
    # a sixteenth of the machine's or container's memory divided by the number of ranks
    capture_queue_mib: Natural = 0
    # Memory per rank for captured rows of the requests in the engine; beyond it, requests wait
    capture_memory_mib: PositiveInt = 4096
    # Captured rows of one request, per capture and rank, that stay in memory until it ends. A
    # larger capture is written while its request runs, and counts as this much against
    # `tuning.capture_memory_mib`
    capture_window_mib: PositiveInt = 64
    # Memory per rank for captured prompt rows, kept for later captures of prompts that the prefix
    # cache serves; 0: such prompts are recomputed
    row_store_mib: Natural = 256
    # Threads per rank that write capture files, as many for harvests (both in the rank's process
    # `midstream-rowd`), and as many that compute readings (lens, features, installed readers). 0:
    # two on CPUs; on a GPU, a quarter of the rank's cores, at least two and at most four
    writer_threads: Natural = 0
    # Layout `auto`: captures up to this size share segment files; larger ones get their own file
    segment_limit_kib: Natural = 64
    segment_mib: PositiveInt = 256  # A segment file is closed at this size
    # Consumer `memory`: maximum size in a response, per prompt
    memory_limit_kib: Annotated[int, msgspec.Meta(ge=1, le=32 * 1024)] = 256
    # Memory per rank for rows of source runs, counting those of all pipeline stages. Unused runs
    # are evicted first, and reread from disk when needed
    run_cache_mib: PositiveInt = 1024
    # Maximum number of sweep cells in a worker's engine: up to 32 in the current step, and those of
    # the next. While other jobs run there, the maximum is a sixteenth of this number, because each
    # step delays the tokens of those jobs until it ends
    sweep_cells_in_flight: PositiveInt = 64
    # Start a cell's forward pass at the token that it patches and, where the engine can, at the
    # layer that it patches (not with compiled forward passes):
    # docs/decisions/0006-reentry-and-grading.md
    sweep_entry: bool = True
    # Maximum number of sequences of harvests in a worker's engine; a sixteenth of it while other
    # jobs run there
    harvest_requests_in_flight: PositiveInt = 64
    # Maximum number of jobs that one worker runs concurrently
    worker_concurrency: PositiveInt = 128
    # Seconds that a worker that is told to stop (SIGTERM) lets its jobs run. Those that have not
    # ended are given back, and begin again on another worker or after the restart
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    # A Celery message that is not renewed is redelivered after this time; live workers renew theirs
    # every 2 s
    visibility_timeout_s: PositiveInt = 30
    sweep_interval_s: Positive = 2.0  # How often the reaper runs
    # Maximum number of messages in transit per model and priority. The other jobs wait in the
    # ledger, where they are scheduled fairly between tenants
    dispatch_window: PositiveInt = 64
    # Share of Redis' `maxmemory` beyond which submissions are also rejected with 503
    redis_fill_limit: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    # Deliveries of a tenant that are neither delivered nor failed; beyond it, jobs with a
    # `callback_url` and redeliveries are rejected with 429 `too_many_webhooks`. 0: no limit
    webhook_pending_limit: Natural = 10_000
    # Maximum duration of an attempt, including name lookup and connection
    webhook_timeout_s: Positive = 20.0
    webhook_log_ttl_s: PositiveInt = 7 * 24 * 3600  # How long the outcome of a delivery is kept
    # Maximum size of a JSON body. A larger one is rejected with 413, before any of it is decoded
    max_body_mib: PositiveInt = 8
    # Maximum size of a file sent instead of JSON (a steering module). A larger one is rejected with
    # 413; files are written to disk as they arrive
    max_file_mib: PositiveInt = 64
    # Maximum number of client connections; fewer if the process may not open that many files.
    # Beyond it, the connection that has been idle longest is closed. If none is idle, only health
    # checks are served; all other requests are rejected with 503
    max_connections: PositiveInt = 10_000
    # Maximum number of open requests of one tenant in one API process, held responses and event
    # streams among them; then 429 `too_many_connections`
    tenant_connections: PositiveInt = 5_000
    # Maximum number of open event streams of one tenant in one API process: `GET /v1/feed`, which
    # the page (docs/page.md) reads, and `…/events` of jobs and harvests; then 429
    # `too_many_streams`
    tenant_streams: PositiveInt = 250
    # How many of these streams a tenant may open per minute in one API process, after a burst of
    # `tuning.tenant_streams`; then 429 `too_many_streams`
    tenant_streams_per_minute: PositiveInt = 1_200
    # Seconds for the headers of a request, counted from the start of the connection or the first
    # byte of the request; then 408
    head_timeout_s: Positive = 15.0
    # Seconds for the body, plus one for each 16 KiB received; then 408
    body_timeout_s: Positive = 30.0
    # Processes that tokenise long texts for the API, and render and search long or many
    # conversations; started when first needed
    tokenizer_processes: PositiveInt = 2
    # Seconds for one long prompt or conversation; then 400, and the process is restarted
    tokenizer_timeout_s: Positive = 20.0
    # Entries of the audit log (docs/keys.md#audit-log) that are kept: the newest; approximate
    audit_entries: PositiveInt = 100_000
    event_limit: PositiveInt = 10_000  # Events kept per job (approximate: Redis trims in blocks)

    @property
    def table_rows(self) -> int:
        """Rows of the ranks' steering tables: what the operator uses is no request's."""
        return self.steering_rows + global_share(self.steering_rows) + 2 * MAX_STEERING_ROWS

    @property
    def table_entries(self) -> int:
        """Vectors of these rows."""
        return self.steering_entries + global_share(self.steering_entries) + 2 * MAX_POLICY_VECTORS
