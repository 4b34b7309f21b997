"""The table `[tuning]` of the settings: sizes, caches, threads and times that fit most services."""

from typing import Annotated

import msgspec

from .records import Record

Positive = Annotated[float, msgspec.Meta(gt=0)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]


class Tuning(Record):
    """Each is set as `tuning.<name>`: in the table `[tuning]` of the file, by
    `--set tuning.<name>=`, or by `MIDSTREAM_TUNING_<NAME>` in the environment.
    """

    # weights of sparse autoencoders that each rank keeps loaded; jobs that need more wait
    sae_cache_mib: PositiveInt = 4096
    # processor seconds to compile an output format; a format that takes longer is rejected (400)
    format_compile_s: Positive = 10.0
    # memory of the worker that transformers' model may use for that comparison; at most half of it
    compare_memory_gib: Positive = 16.0
    # seconds without a job after which the gradient worker drops its model from memory
    gradients_idle_s: Positive = 600.0
    # more CUDA graphs for each batch shape, with fewer launches of sites, for steps that need no
    # others; false: to find out whether a fault comes from them
    graph_families: bool = True
    # distinct steering configurations in the engine; more than `max_num_seqs`: waiting requests
    # prepare theirs
    steering_rows: PositiveInt = 256
    # vectors of all these configurations; sites with the same entries share vectors
    steering_entries: PositiveInt = 8192
    # vectors kept on the ranks after the end of their jobs
    vector_cache_mib: PositiveInt = 256
    # accelerators: buffer for the rows captured in one step; 0: by the model's shape, see
    # `schemas.base.ring`
    capture_buffer_mib: Natural = 0
    # captured rows waiting for the writers, per rank; 0: by the model's shape, see
    # `schemas.base.ring`
    capture_queue_mib: Natural = 0
    # captured rows of the requests in the engine, per rank; beyond it, requests wait
    capture_memory_mib: PositiveInt = 4096
    # rows of one capture in memory; longer captures are written while their request runs
    capture_window_mib: PositiveInt = 64
    # rows kept for captures of prompts that the prefix cache serves; 0: recomputed instead
    row_store_mib: Natural = 256
    writer_threads: Natural = 0  # per rank; 0: sized from its cores
    segment_limit_kib: Natural = 64  # layout `auto`: captures up to this size share segment files
    segment_mib: PositiveInt = 256  # a segment file is closed at this size
    # consumer `memory`: the most that a response returns, per prompt
    memory_limit_kib: Annotated[int, msgspec.Meta(ge=1, le=32 * 1024)] = 256
    # rows in a response to vllm-lens' clients; 0: reject their fields
    vllm_lens_mib: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 32
    # rows of source runs in memory, per rank; unused ones are evicted and read from disk when
    # needed
    run_cache_mib: PositiveInt = 1024
    # cells of all sweeps in the engine at a time: those of one step and of the next
    sweep_cells_in_flight: PositiveInt = 64
    # start a cell's forward pass at the patched layer, where the engine can
    sweep_entry: bool = True
    # sequences of all harvests in a worker's engine at a time; a sixteenth of it next to other jobs
    harvest_requests_in_flight: PositiveInt = 64
    worker_concurrency: PositiveInt = 128  # concurrent jobs of one worker
    visibility_timeout_s: PositiveInt = 30
    sweep_interval_s: Positive = 2.0
    # messages in the queue per model and priority; further jobs wait in the ledger, fair between
    # tenants
    dispatch_window: PositiveInt = 64
    # share of Redis' maxmemory beyond which submissions get 503
    redis_fill_limit: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    # pending deliveries of a tenant; beyond it, jobs with a callback get 429; 0: no limit
    webhook_pending_limit: Natural = 10_000
    webhook_timeout_s: Positive = 20.0
    webhook_log_ttl_s: PositiveInt = 7 * 24 * 3600  # how long the record of a delivery is kept
    max_body_mib: PositiveInt = 8  # of a JSON body
    max_file_mib: PositiveInt = 64  # of a file in place of a JSON body: modules
    # connections of clients; fewer if the process may not open that many files
    max_connections: PositiveInt = 10_000
    # open requests of one tenant in one process, including held responses and streams
    tenant_connections: PositiveInt = 5_000
    # open event streams of one tenant in one process, including those of the page
    tenant_streams: PositiveInt = 250
    # event streams that one tenant may open, after a burst of `tenant_streams`
    tenant_streams_per_minute: PositiveInt = 1_200
    # time for a new connection, or for one that has begun a request, to send its headers
    head_timeout_s: Positive = 15.0
    # time for a body to arrive; larger bodies get another second per 16 KiB
    body_timeout_s: Positive = 30.0
    tokenizer_processes: PositiveInt = 2  # processes that tokenise long texts for the API
    tokenizer_timeout_s: Positive = 20.0  # per long prompt or conversation
    event_limit: PositiveInt = 10_000  # events kept per job
