"""Settings: one object, read from the environment and a TOML file, validated once at start."""

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import parse_qsl, urlsplit

import msgspec

from ..base.errors import Translated, suggestion
from ..base.limits import MAX_DRAFTS, MAX_HITS, MAX_IMAGE, Share
from ..base.records import Record, json_or_text, to_json
from .secret_files import is_burnt, is_exposed
from .tuning import Natural, Positive, PositiveInt, Tuning
from .vllm_options import VllmOptions

#: Name of a setting → its value, or its type.
ByName = dict[str, Any]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
#: Folders of `artifacts_dir`.
ArtifactFolder = Literal["loras", "lenses", "saes"]

#: The value of `tool_parser` with which chats take no tools.
NO_TOOLS = "none"
PREFIX = "MIDSTREAM_"
FILE_VARIABLE = "MIDSTREAM_CONFIG"
#: The option that sets any setting: the source that errors name.
SET = "--set"
#: The table of a file with vLLM's options; text under the same name is the setting `engine`.
ENGINE_TABLE = "engine"
#: The most bytes of `engine_options` as JSON: child processes get them in one environment variable.
ENGINE_OPTIONS_BYTES = 64 << 10

#: Patterns of `artifact_store`, if it is not a folder, and of its endpoints.
_STORE = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_./-]*)?")
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+")


#: Settings that are secrets. They are read from a file only if other accounts cannot read it.
SECRETS = (
    "flower_auth",
    "artifact_secret_key",
    "admin_key",
    "observe_key",
    "api_key",
)

#: Parameters of a `redis_url` that name files: the authorities that sign Redis' certificate, and
#: the client certificate with its key, if Redis requires one.
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
#: Schemes of a `redis_url`.
REDIS_SCHEMES = ("redis", "rediss", "unix")


#: The end of a setting's name → the unit of its value.
UNITS = {"_mib": "MiB", "_gib": "GiB", "_s": "seconds"}


class SettingsError(ValueError):
    """A setting is invalid; the message names the setting and its source."""


class DefaultLimits(Record):
    """The table `[limits]`: those of tenants that have none of their own; 0: no limit. See
    `schemas.access.keys.Limits`.
    """

    requests_per_minute: Natural = 0  # Submissions of the tenant per minute
    # Tokens of its prompts per minute, plus `max_tokens` of each; for a sweep, of all its requests
    tokens_per_minute: Natural = 0
    jobs_in_flight: Natural = 0  # Its accepted, unfinished jobs
    capture_mib: Natural = 0  # Its capture files and harvests that have not been deleted
    sweep_cells: Natural = 0  # Cells of its unfinished sweeps
    modules: Natural = 0  # Its named steering modules, for all models
    module_mib: Natural = 0  # Total size of its modules: vectors, and the entries that name them
    harvests: Natural = 100  # Its harvests that have not ended


class GlobalCapture(Record):
    """The table `[global_capture]`: what is captured of every request."""

    sites: str = ""  # Sites captured for every request, such as `post_block:all;pre_attn:0-17`
    # Positions of the global capture: a name, a list separated by commas, or a range such as `5:9`
    # or `5:`
    positions: str = "last_prompt"
    tag: str = "global"  # Tag of the global capture


class Settings(Record):
    """Every setting.

    `MIDSTREAM_<NAME>` in the environment overrides the file, the file overrides the default. The
    comments are the tables of `docs/reference/settings.md`, and a comment between blank lines is a
    section.
    """

    # Locations and addresses

    # Redis AOF, receipts, captures, logs: docs/operations.md#the-data-directory. Relative to the
    # working directory
    data_dir: str = ".midstream"
    # Folder of the demo model; shared by all data directories
    cache_dir: str = "~/.cache/midstream"
    # For the Redis that `midstream up` starts. `always`: every response waits for the disk, and
    # nothing is lost (docs/reliability.md#what-is-not-guaranteed), even in a power failure
    redis_appendfsync: Literal["everysec", "always"] = "everysec"
    # Memory limit of the Redis that `midstream up` starts; `0`: no limit except the machine's.
    # Submissions are rejected once memory usage, with what accepted jobs may still store, exceeds
    # the share `tuning.redis_fill_limit` of this limit
    redis_maxmemory_mib: Natural = 0
    # With user, password and TLS files (docs/machines.md#redis-tls-and-users), so in a file if it
    # has a password (`MIDSTREAM_REDIS_URL_FILE`): one Redis ≥ 6.2 with AOF and `noeviction`, or the
    # address that always leads to the master (docs/machines.md#failover). Empty: `midstream up`
    # starts its own on a free loopback port
    redis_url: str = ""
    # Accept a Redis that has no AOF or evicts keys: accepted jobs may then be lost. By default,
    # API, worker, relay and callbacks reject such a Redis
    redis_allow_lossy: bool = False
    # So many replicas must have a write before it is acknowledged. With fewer than there are, a
    # failover may lose what was acknowledged: docs/machines.md#failover
    redis_replicas: Natural = 0
    # `tcp://host:port` that the relay binds to and the ranks connect to. For workers, several
    # addresses separated by commas: without a connection for 2 s, a rank tries the next relay
    # (docs/machines.md#several-relays). Empty: `midstream up` picks a free loopback port
    relay_url: str = ""
    # Let the relay bind to a non-loopback address without CURVE keys. Use it only on a network
    # where every machine is trusted
    relay_allow_remote: bool = False
    # Folder where relay and workers of one account create and find their CURVE keys. An account
    # that can read it can send receipts. `midstream up` uses `secrets/curve` of the data directory
    # unless another `curve_…` setting or `relay_allow_remote` is set
    curve_dir: str = ""
    # The private CURVE key of this process (relay or worker): docs/machines.md#receipts-curve
    curve_secret_file: str = ""
    # Worker: the relay's public key. `MIDSTREAM_CURVE_SERVER_KEY_FILE` names a file that contains
    # it
    curve_server_key: str = ""
    # Relay: folder of the workers' public keys, `<worker_id>.pub`. Reread when it changes
    curve_clients_dir: str = ""
    # Address that the API binds to. On a non-loopback address, the API requires keys (docs/keys.md)
    # and does not start if there are none
    api_host: str = "127.0.0.1"
    # The API's port. 0: a free port. If the default port is taken, `midstream up` reports it and
    # uses a free one; a port that is set anywhere must be free
    api_port: Port = 8321
    # Address that Flower binds to. On a non-loopback address, or if the API requires keys, Flower
    # starts only with `flower_auth`
    flower_host: str = "127.0.0.1"
    # Flower's port. 0: a free port; a default port that is taken is handled as with `api_port`
    flower_port: Port = 5555
    # The `user:password` that Flower requires; several are separated by commas. Empty: if a
    # password is required (see `flower_host`), `midstream up` creates one in `secrets/flower.auth`
    # of the data directory; otherwise, Flower requires none and rejects calls to host names other
    # than its own and those in `allowed_hosts`
    flower_auth: str = ""
    # Prefix of `Location` and capture links, and the first address the CLI tries. Empty: links are
    # relative
    public_url: str = ""

    # The model

    # A checkpoint folder (`/…`, `./…`, `../…`, `~…`) or a hub name. Empty: `midstream up` uses the
    # demo model
    model: str = ""
    model_name: str = ""  # The name that requests use. Empty: the last part of `model`
    # vLLM's executor. `auto`: vLLM decides; a single rank on a GPU then shares a process with the
    # scheduler. `mp`: each rank has a process of its own (when that helps:
    # docs/capacity.md#one-process-or-two). `ray` spreads the ranks over the machines of a Ray
    # cluster: docs/machines.md#one-engine-on-several-machines
    executor: Literal["auto", "mp", "ray"] = "auto"
    # vLLM's model runner: `auto`, `v1` or `v2`. On CPUs, `auto` is `v1`, because the v2 runner
    # needs Triton
    runner: Literal["auto", "v1", "v2"] = "auto"
    # `shared`: all tenants reuse each other's cached prompt blocks. `tenant`: only their own, so
    # that latency reveals nothing (docs/keys.md#what-keys-do-not-do) about prompts of other
    # tenants, at the cost of computing common prompts once per tenant
    prefix_cache_scope: Literal["shared", "tenant"] = "shared"
    # Maximum number of images in one prompt, for models that take images: docs/vllm.md#images. `0`:
    # text only, and the image encoder is not loaded
    images_per_prompt: Annotated[int, msgspec.Meta(ge=0, le=MAX_IMAGE + 1)] = 4
    # Speculative decoding (docs/vllm.md#speculative-decoding): draft tokens of a request in one
    # engine step, at most 31; 0: none
    speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFTS)] = 0
    # What makes the drafts: `ngram` (looks them up in the text so far), `eagle3` (an EAGLE-3 head,
    # see `draft_model`), `mtp` (the model's own multi-token prediction layers)
    drafter: Literal["ngram", "eagle3", "mtp"] = "ngram"
    draft_model: str = ""  # The EAGLE-3 head: a checkpoint folder or a hub name
    kv_cache_gib: Positive = 1.0  # Size of the KV cache on CPUs; on a GPU, vLLM determines it
    # All other options of vLLM, or those of the engine that `engine` names: in the file, in the
    # table `[engine]`; in the environment, one JSON object; on the command line, `--engine
    # NAME=VALUE`. Which ones are accepted: docs/vllm.md#options-of-vllm
    engine_options: dict[str, Any] = {}

    # Registered artifacts

    # Folder with the folders `loras`, `lenses` and `saes`, below which these may be registered; API
    # and workers read it at the same path, and gradient workers write the lenses there that they
    # fit. Empty: `data_dir`
    artifacts_dir: str = ""

    # Tools, extensions and proof

    # vLLM's parser of the model's tool calls, such as `hermes`. Empty: chosen by the chat template
    # (docs/coming-from.md#tool-calls), where that is unambiguous. Without one, or with `none`,
    # chats with `tools` are rejected. See docs/http.md#tools-formats-and-choices
    tool_parser: str = ""
    # Packages whose readers and ops (docs/extending.md) are loaded, separated by commas. Other
    # installed packages are not imported
    extensions: str = ""
    # Before the first request, compare the rows of the first layers, and the logits, with
    # transformers' of the same checkpoint (how:
    # docs/architectures.md#what-is-compared-with-transformers). If they differ, the engine does not
    # start. `auto`: a model that cannot be compared is served, and `caveats` says why; `require`:
    # it is not served, and neither is one with an option, version or quantisation that is unproven
    # (docs/vllm.md#what-decides-about-an-option); `off`: nothing is compared, and `caveats` says so
    compare: Literal["auto", "require", "off"] = "auto"
    # Prove the hook points with real requests before the first one of a user (how:
    # docs/architectures.md#what-is-proven-before-traffic); a hook that fails is not served.
    # `false`: every hook is served unproven, and `caveats` says so in `/v1/models` and every
    # manifest
    certify: bool = True

    # Gradients

    # `midstream up` also starts a gradient worker (docs/deployment.md#gradient-workers)
    gradients: bool = False
    # Device of a gradient worker's model: `cpu`, `cuda:N`, or `auto`: the GPU with the most free
    # memory, all GPUs if one is too small, the CPU where there is none
    gradients_device: str = "auto"

    # The data plane

    # Installed hook points, separated by commas: `all` those of the residual stream, `inside` those
    # inside attention and MLP (see docs/http.md), or single names; fewer hooks cost less in
    # compiled forward passes. A request for any other hook is rejected with an error that names the
    # hook
    hooks: str = "all"
    # What happens to jobs whose ranks disagreed on what they applied: `retry` runs them once more
    # as a fresh attempt, `fail` fails them immediately. See
    # docs/steering.md#when-ranks-disagree
    on_desync: Literal["retry", "fail"] = "retry"
    # How long a change to global steering waits for the workers' checks (seconds). Should be longer
    # than `lease_s`, so that a worker killed just before a change does not make the change fail
    steering_wait_s: Positive = 20.0
    # When a queue of `tuning.capture_queue_mib` (files, harvests or readings) is full: `block` (its
    # requests wait, others run; once nothing of it was done for 30 s, its captures in the engine
    # fail, and new ones wait until there is room), `spill` (rows go to files under
    # `<data dir>/spill`), `drop` (its rows are not recorded; the capture is `partial` and lists
    # them)
    capture_overload: Literal["block", "spill", "drop"] = "block"

    # Artifact store

    # Where captures are kept: `s3://bucket/prefix`, or a folder.
    # `?endpoint=https://s3.example:9000` after a bucket names an S3 server that is not AWS', and
    # `region=` its region (without it: `AWS_REGION`, or `us-east-1`). Empty: `captures` in
    # `data_dir`. A folder in memory (tmpfs) is written twice as fast or more if it is mounted with
    # `huge=always`; `midstream doctor` says whether it is
    artifact_store: str = ""
    # Access key. Empty: AWS' own variables, its credentials file, or the machine's role
    artifact_access_key: str = ""
    # Secret key that belongs to it; better as a file: `MIDSTREAM_ARTIFACT_SECRET_KEY_FILE`
    artifact_secret_key: str = ""
    # `presigned`: capture manifests contain links by which files are downloaded from the bucket
    # itself; `api`: downloads go through the API alone
    artifact_links: Literal["presigned", "api"] = "presigned"
    # How long a presigned link works, in seconds; at most a week
    artifact_link_s: Annotated[int, msgspec.Meta(ge=1, le=7 * 24 * 3600)] = 900
    # Total time that a job with captures, or with patches from a source run, waits while the store
    # is unavailable; then it fails
    artifact_wait_s: Positive = 3600.0
    # Address in presigned links, if users reach the store at another address than the service does
    artifact_public_endpoint: str = ""

    # Captures

    # Maximum total size of the captures in the artifact store; beyond it, captures are rejected; 0:
    # no quota
    capture_quota_mib: Natural = 0
    # Captures are deleted this many seconds after the end of their job; 0: never
    capture_ttl_s: Natural = 0

    # Source runs and sweeps

    sweep_cells: PositiveInt = 20_000  # Maximum number of cells in one sweep
    # Maximum number of cells in all unfinished sweeps; a sweep beyond it is rejected with 429
    sweep_cells_waiting: PositiveInt = 200_000

    # Policies

    # Hits of each policy that are kept for review (docs/probes.md#review), the newest; as many are
    # kept beside them once they are marked. With `keep_texts`, a hit takes up to 9 KiB of Redis'
    # memory, otherwise half a KiB. 0: none
    hits_kept: Annotated[int, msgspec.Meta(ge=0, le=MAX_HITS)] = 1000
    # Seconds for which a hit is kept, with its text and its mark
    hits_ttl_s: PositiveInt = 30 * 24 * 3600

    # Harvests

    # Folders or bucket URIs that harvests (docs/harvest.md) may be made in, separated by commas.
    # Requests name one of them, or get the first. Empty: the folder `harvests` in `data_dir`, or in
    # the bucket of `artifact_store`. API and workers must reach them under the same name
    harvest_stores: str = ""
    # Folders or bucket URIs that corpora may be read from, separated by commas. Empty: only
    # documents in the request. API and workers must reach them under the same name
    harvest_sources: str = ""

    # The worker

    # The engine: `vllm`; `gradients` for a gradient worker (docs/deployment.md#gradient-workers),
    # which serves the model's queue of gradient jobs; or the name of one that an installed package
    # offers (docs/extending.md#an-engine)
    engine: str = "vllm"
    # Identifies the outbox and the leases, and must be stable across restarts. Empty: host name and
    # model. Only one live process may use an id
    worker_id: str = ""
    # Maximum time from a job's last output to its last receipt, counting only time in which a relay
    # (docs/machines.md#several-relays) is alive; after that, the job fails with
    # `receipts_timed_out`
    capture_timeout_s: Positive = 60.0
    # Duration of a running job's lease, which is renewed after a third of it. If a worker goes
    # silent, its jobs run again after their leases expire
    lease_s: Positive = 15.0
    # After this many attempts, a job whose worker died fails with `worker_lost`
    max_attempts: PositiveInt = 5
    # What happens to a job when the worker that takes it serves a model of another identity
    # (docs/reliability.md#the-identity-of-a-model) than the one that the job was accepted for:
    # `fail` fails it with `model_changed`, `wait` leaves it queued until a worker with its own
    # model serves the name
    on_model_change: Literal["fail", "wait"] = "fail"

    # Access

    # `auto`: API keys are required if the API listens on a non-loopback address; `keys`: always;
    # `open`: never, so every caller has full access
    auth: Literal["auto", "keys", "open"] = "auto"
    # A key with scope `admin` that is always valid, for the first start: `midstream create
    # admin-key` prints one. `MIDSTREAM_ADMIN_KEY_FILE` names a file that contains it
    admin_key: str = ""
    # A key with scope `observe` that is always valid, for Prometheus: it opens `/metrics` of the
    # API and of Flower. `MIDSTREAM_OBSERVE_KEY_FILE` names a file that contains it
    observe_key: str = ""
    # Names and addresses (docs/keys.md#host-names-and-browsers) under which the API may be called,
    # separated by commas, in addition to `localhost` and loopback addresses. Empty: no others if
    # keys are not required, any if they are
    allowed_hosts: str = ""
    # Addresses and networks of reverse proxies (docs/keys.md#behind-a-proxy), separated by commas,
    # whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed, such as `127.0.0.1`. Empty: none
    trusted_proxies: str = ""
    # The key that the Python client and the command line send. `MIDSTREAM_API_KEY_FILE` names a
    # file that contains it
    api_key: str = ""

    # Scheduling

    # Maximum number of waiting jobs of all models; beyond it, submissions are rejected with 503. 0:
    # no limit
    queue_limit: Natural = 100_000

    # Webhooks

    # Also call loopback, private and link-local addresses; metadata services of clouds are never
    # called
    webhook_allow_private: bool = False

    # Observability

    # `json`: one JSON object per line, from every process, including the engine
    log_format: Literal["text", "json"] = "text"
    # Port of this process's own Prometheus metrics (worker, relay, callbacks; the API has
    # `/metrics`); 0: none. `midstream up` uses this port for the relay, the next for the worker,
    # the one after it for callbacks
    metrics_port: Port = 0
    # Address on which these metrics are served; no key is required there
    metrics_host: str = "127.0.0.1"
    # Address of Grafana as users reach it: a link on the page (docs/page.md). Empty: no link
    grafana_url: str = ""
    # Target of traces: OTLP over HTTP, such as `http://127.0.0.1:4318`; needs the extra `otel`.
    # Empty: no traces
    otel_endpoint: str = ""

    # HTTP server

    # Maximum time for which a response is held: completions, `Prefer: wait` and `?wait=`
    max_wait_s: Positive = 600.0
    # A finished job's result is removed after this many seconds (410); that the job existed is
    # remembered for twice as long. Capture files stay
    result_ttl_s: PositiveInt = 7 * 24 * 3600
    # A policy that more than this share of a day's prompts triggered is shown with a warning
    policy_warn_share: Share = 0.5
    # `DEBUG`, `INFO`, `WARNING` or `ERROR`
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    # Tests only: a fault that the ranks inject, or a point at which a process dies
    # (`crash:at=relay.committed`, see docs/reference/faults.md). Leave it empty
    fault: str = ""

    # Tables of the file: see their records; the first is the table [engine]
    vllm: VllmOptions = VllmOptions()
    limits: DefaultLimits = DefaultLimits()
    global_capture: GlobalCapture = GlobalCapture()
    tuning: Tuning = Tuning()

    @property
    def served_model(self) -> str:
        return self.model_name or Path(self.model).name

    @property
    def queue(self) -> Literal["", "gradients"]:
        """The queue of the model that a worker with these settings serves, see
        `schemas.requests.attributions.Queue`.
        """
        return "gradients" if self.engine.partition("-")[0] == "gradients" else ""

    @property
    def capture_root(self) -> Path:
        """The default folder of captures, if no setting names a store."""
        return Path(self.data_dir).resolve() / "captures"

    @property
    def artifacts(self) -> str:
        """The artifact store for `open_store`: a folder, or a URI without credentials."""
        return self.artifact_store or str(self.capture_root)

    def artifacts_of(self, kind: ArtifactFolder) -> str:
        """Return the folder below which artifacts of a kind are registered."""
        return str(Path(self.artifacts_dir or self.data_dir).expanduser().resolve() / kind)


#: Tables of the file → their fields of `Settings`.
TABLES = {
    ENGINE_TABLE: "vllm",
    "limits": "limits",
    "global_capture": "global_capture",
    "tuning": "tuning",
}


def load_settings(
    environ: dict[str, str] | None = None, given: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """Load settings from defaults, the TOML file named by `MIDSTREAM_CONFIG`, the environment,
    `given` (texts of `--set`), and `overrides`, in increasing precedence.

    Raises SettingsError naming the setting and its source.
    """
    known = known_settings()
    fields: ByName = {field: {} for field in (*TABLES.values(), "engine_options")}
    for name, value in chosen(environ, given, **overrides).items():
        table, dot, entry = name.partition(".")
        place = fields[TABLES[table] if name in known else "engine_options"] if dot else fields
        place[entry or name] = value
    settings = msgspec.convert(fields, Settings)
    if len(to_json(settings.engine_options)) > ENGINE_OPTIONS_BYTES:
        raise SettingsError(f"engine_options: longer than {ENGINE_OPTIONS_BYTES >> 10} KiB as JSON")
    _check_store(settings)
    _check_redis(settings.redis_url)
    return settings


def chosen(
    environ: dict[str, str] | None = None, given: Mapping[str, str] | None = None, **overrides: Any
) -> ByName:
    """Return the settings that a source names, also with the default as the value; all others are
    left at their defaults. Those of a table are named `table.name`, as are vLLM's other options.
    Arguments and errors are those of `load_settings`.
    """
    env = dict(os.environ) if environ is None else environ
    known = known_settings()
    values: ByName = {}
    if file := env.get(FILE_VARIABLE):
        with Translated(
            (OSError, tomllib.TOMLDecodeError),
            lambda error: SettingsError(f"{FILE_VARIABLE}={file}: {error}"),
        ):
            content = _flat(tomllib.loads(Path(file).read_text()))
            values.update(_checked(content, known, f"file {file}"))
            if secrets := [name for name, value in values.items() if _is_secret(name, value)]:
                refuse_exposed(
                    f"{FILE_VARIABLE}={file}", file, f"contains {', '.join(secrets)}, and "
                )
    variables = {variable(name): name for name in known}
    from_env = {
        variables.get(name, name[len(PREFIX) :].lower()): text
        for name, text in env.items()
        if name.startswith(PREFIX) and name != FILE_VARIABLE
    }
    arguments = {name: value for name, value in overrides.items() if value is not None}
    values |= _checked(_with_files(from_env, known), known, "environment")
    values |= _checked(_with_files(dict(given or {}), known), known, SET)
    values |= _checked(arguments, known, "arguments")
    for name in SECRETS:
        if is_burnt(str(values.get(name, ""))):
            raise SettingsError(
                f"{name}: this value was published in Midstream's repository, so everyone knows "
                "it: create another one"
            )
    return values


def known_settings() -> ByName:
    """Return the name of every setting, `table.name` for those of a table, → its type."""
    known = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    for table, name in TABLES.items():
        of = msgspec.structs.fields(known.pop(name))
        known |= {f"{table}.{field.name}": field.type for field in of}
    return known


def values_of(settings: Settings) -> ByName:
    """Return the value of every setting, under the names of `known_settings`."""
    values = msgspec.structs.asdict(settings)
    for table, name in TABLES.items():
        of = msgspec.structs.asdict(values.pop(name))
        values |= {f"{table}.{field}": value for field, value in of.items()}
    return values


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.replace(".", "_").upper()


def _flat(values: ByName) -> ByName:
    """Return a file's contents with the entries of its tables beside the others."""
    if isinstance(values.get(ENGINE_TABLE), dict) and "engine_options" in values:
        raise SettingsError("engine_options and the table [engine] are both set: use one")
    parts = (
        {f"{name}.{field}": of for field, of in value.items()}
        if name in TABLES and isinstance(value, dict)
        else {name: value}
        for name, value in values.items()
    )
    return {name: value for part in parts for name, value in part.items()}


def refuse_exposed(label: str, path: str, reason: str = "") -> None:
    """Raise SettingsError if every account of this machine can read the secret in a file."""
    if is_exposed(Path(path)):
        raise SettingsError(
            f"{label}: {reason}every account of this machine can read it: run chmod o-r on "
            "it, and replace the secret"
        )


def _check_store(settings: Settings) -> None:
    """Raise SettingsError for an invalid store or Grafana URL."""
    store = settings.artifact_store
    place, _, query = store.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    known = options.keys() <= {"endpoint", "region"} and all(options.values())
    if "://" in store and not (known and _STORE.fullmatch(place)):
        raise SettingsError(
            f"artifact_store={store!r}: valid: s3://bucket/prefix, with ?endpoint=URL&region=NAME "
            "if the store is not AWS' or in another region, or a folder"
        )
    if settings.grafana_url and not settings.grafana_url.startswith(("http://", "https://")):
        raise SettingsError(f"grafana_url={settings.grafana_url!r}: valid: http://… or https://…")
    for name, value in (
        ("endpoint of artifact_store", options.get("endpoint")),
        ("artifact_public_endpoint", settings.artifact_public_endpoint),
    ):
        if value and not _ENDPOINT.fullmatch(value):
            raise SettingsError(f"{name}={value!r}: valid: http://host:port or https://host:port")
    if bool(settings.artifact_access_key) != bool(settings.artifact_secret_key):
        raise SettingsError(
            "artifact_access_key and artifact_secret_key belong together: set both, or none"
        )


def engine_options(pairs: Iterable[str]) -> ByName:
    """Parse `NAME=VALUE` of `--engine`."""
    options: ByName = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(
                f"--engine {pair!r}: write it as NAME=VALUE, such as gpu_memory_utilization=0.8"
            )
        options[name.strip().replace("-", "_")] = json_or_text(value)
    return options


def _with_files(from_env: dict[str, str], known: ByName) -> dict[str, str]:
    """Read `<NAME>` from the file that `MIDSTREAM_<NAME>_FILE` names: the usual form of secrets in
    containers.
    """
    values = dict(from_env)
    for name, path in from_env.items():
        setting = name.removesuffix("_file")
        if name in known or setting == name or setting not in known:
            continue
        if setting in from_env:
            raise SettingsError(f"{variable(setting)} and {variable(name)} are both set: use one")
        try:
            values[setting] = Path(path).read_text().strip()
            if _is_secret(setting, values[setting]):
                refuse_exposed(f"{variable(name)}={path}", path)
        except OSError as error:
            raise SettingsError(f"{variable(name)}={path}: {error.strerror}") from error
        del values[name]
    return values


def _check_redis(redis_url: str) -> None:
    """Raise SettingsError for another URL than Redis', for TLS files in one without TLS, or files
    that do not exist: redis-py reads them only when it connects.
    """
    parts = urlsplit(redis_url)
    if redis_url and parts.scheme not in REDIS_SCHEMES:
        valid = ", ".join(f"{scheme}://…" for scheme in REDIS_SCHEMES)
        raise SettingsError(f"redis_url: not a URL of Redis, such as redis://HOST:6379/0 ({valid})")
    for name, path in parse_qsl(parts.query):
        if name not in TLS_FILES:
            continue
        if not parts.scheme.startswith("rediss"):
            raise SettingsError(
                f"redis_url has {name} and is not rediss://…, so nothing would be encrypted"
            )
        if not Path(path).is_file():
            raise SettingsError(f"redis_url: {name}={path!r}: no such file")


def _is_secret(name: str, value: Any) -> bool:
    return name in SECRETS or (name == "redis_url" and "@" in value)


def _checked(raw: ByName, known: ByName, source: str) -> ByName:
    """Convert each value to its setting's type; of texts, `"false"` becomes false."""
    texts = source in ("environment", SET)
    where = "" if source == SET else f" ({source})"
    label = {"environment": variable, SET: f"{SET} {{}}".format}.get(source, str)
    checked = {}
    for name, value in raw.items():
        if name not in known and name.startswith(f"{ENGINE_TABLE}."):  # `option_check` knows these
            checked[name] = json_or_text(value) if texts else value
            continue
        if name not in known:
            named = next((full for full in known if full.endswith(f".{name}")), name)
            hint = suggestion(named, TABLES if isinstance(value, dict) else known)
            raise SettingsError(
                f"{label(name)}{where}: unknown setting" + (f"; {hint}" if hint else "")
            )
        try:
            if texts and name == "engine_options":
                value = json.loads(value)
            checked[name] = msgspec.convert(value, known[name], strict=not texts)
        except (msgspec.ValidationError, json.JSONDecodeError) as error:
            valid = _valid(name, known[name])
            raise SettingsError(f"{label(name)}={value!r}{where}: {error}{valid}") from error
    options = _flat({ENGINE_TABLE: checked.pop("engine_options", {})})
    return checked | (_checked(options, known, label("engine_options")) if options else {})


def _valid(name: str, kind: Any) -> str:
    """Return the end of an error: the valid values of a setting, or the unit of its number."""
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    if choices or kind is bool:
        return f"; valid: {', '.join(choices or ('true', 'false'))}"
    units = (f": a number of {unit}" for end, unit in UNITS.items() if name.endswith(end))
    return next(units, "")


def relay_addresses(relay_url: str) -> list[str]:
    """Return the relay addresses in `relay_url`, which a rank tries in turn. Raises
    SettingsError.
    """
    addresses = [address.strip() for address in relay_url.split(",")]
    for address in addresses:
        try:
            parts = urlsplit(address)
            valid = parts.scheme == "ipc" or (
                parts.scheme == "tcp" and parts.hostname and parts.port
            )
        except ValueError:
            valid = False
        if not valid:
            raise SettingsError(
                f"relay_url={relay_url!r}: {address!r} is not a relay's address; valid: "
                "tcp://HOST:PORT, or several, separated by commas"
            )
    return addresses


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at `host`, a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def asks_for_keys(settings: Settings) -> bool:
    """Return whether the API requires a key."""
    return settings.auth == "keys" or (
        settings.auth == "auto" and not is_loopback(settings.api_host)
    )


def to_environment(settings: Settings) -> dict[str, str]:
    """Return the settings as `MIDSTREAM_*` variables for a child process, from which
    `load_settings` returns equal settings.
    """
    return {
        variable(name): _as_text(value)
        for name, value in values_of(settings).items()
        if value is not None and value != "" and value != {}
    }


def _as_text(value: object) -> str:
    if isinstance(value, dict):
        return to_json(value).decode()
    return str(value).lower() if isinstance(value, bool) else str(value)
