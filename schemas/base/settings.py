"""Settings: one object, read from the environment and a TOML file, validated once at start."""

import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec

from .dtypes import DType
from .errors import Translated, suggestion
from .limits import MAX_IMAGE
from .records import Record, to_json
from .secret_files import is_burnt, is_exposed
from .tuning import Natural, Positive, PositiveInt, Tuning

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

#: The value of `tool_parser` with which chats take no tools.
NO_TOOLS = "none"
PREFIX = "MIDSTREAM_"
FILE_VARIABLE = "MIDSTREAM_CONFIG"
#: The option that sets any setting: the source that errors name.
SET = "--set"
#: The table of a file that sets `engine_options`; text under the same name is the setting `engine`.
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
#: Schemes of a `redis_url` that names sentinels, without and with TLS: see `broker.ops.redis_open`.
SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")


class SettingsError(ValueError):
    """A setting is invalid; the message names the setting and its source."""


class DefaultLimits(Record):
    """The table `[limits]`: those of tenants that have none of their own; 0: no limit. See
    `schemas.access.keys.Limits`.
    """

    requests_per_minute: Natural = 0
    tokens_per_minute: Natural = 0
    jobs_in_flight: Natural = 0
    capture_mib: Natural = 0
    sweep_cells: Natural = 0
    modules: Natural = 0
    module_mib: Natural = 0
    harvests: Natural = 100


class GlobalCapture(Record):
    """The table `[global_capture]`: what is captured of every request."""

    sites: str = ""  # `post_block:all;pre_attn:0-17`; empty: nothing
    positions: str = "last_prompt"  # a name, positions separated by commas, or a range: 5:9, 5:
    tag: str = "global"


class Settings(Record):
    """Every setting.

    `MIDSTREAM_<NAME>` in the environment overrides the file, the file overrides the default.
    """

    # Addresses and folders
    data_dir: str = ".midstream"  # Redis AOF, outboxes, captures, logs
    cache_dir: str = "~/.cache/midstream"  # demo model; shared by all data directories
    # of the Redis that `midstream up` starts; `always` syncs before each response: slower, but
    # nothing is lost
    redis_appendfsync: Literal["everysec", "always"] = "everysec"
    # of the Redis that `midstream up` starts; 0: no limit
    redis_maxmemory_mib: Natural = 0
    # with user, password and TLS files: see `broker.ops.redis_open`; empty: `midstream up` starts
    # its own on a free loopback port
    redis_url: str = ""
    # accept a Redis without AOF, or one that evicts keys: accepted jobs may be lost
    redis_allow_lossy: bool = False
    # the least number of replicas that must have a write before it is acknowledged
    redis_replicas: Natural = 0
    # tcp://host:port of the relay's ROUTER socket, for ranks also several, separated by commas;
    # empty: `midstream up` picks a free port
    relay_url: str = ""
    # let the relay listen beyond loopback without CURVE keys: only on a trusted network
    relay_allow_remote: bool = False
    # folder where relay and workers of one account create and find their CURVE keys automatically
    curve_dir: str = ""
    # file of this process's private CURVE key (relay or worker), from `midstream create curve`
    curve_secret_file: str = ""
    curve_server_key: str = ""  # worker: the relay's public key
    # relay: folder of the workers' public keys, `<worker_id>.pub`; reloaded when it changes
    curve_clients_dir: str = ""
    api_host: str = "127.0.0.1"
    api_port: Port = 8321  # 0: a free port
    flower_host: str = "127.0.0.1"  # beyond loopback Flower requires `flower_auth`
    flower_port: Port = 5555  # 0: a free port
    flower_auth: str = ""  # user:password of Flower, several separated by commas; empty: no login
    public_url: str = ""  # URL under which users reach the API; empty: relative links

    # The model
    model: str = ""  # a checkpoint folder or hub name
    model_name: str = ""  # the name in requests; empty: last part of `model`
    dtype: Literal["auto", DType] = "auto"
    max_model_len: PositiveInt | None = None  # tokens; default: the model's own
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    # how vLLM's ranks are started: `mp` in processes of their own, also a single one on a GPU;
    # `ray` on the machines of a Ray cluster
    executor: Literal["auto", "mp", "ray"] = "auto"
    # machines that share one engine without Ray: `python -m midstream.workers.follower` on all but
    # the first
    nodes: PositiveInt = 1
    node_rank: Natural = 0  # index of this machine; 0: the machine with the worker
    node_master: str = ""  # host:port of the first machine, where the ranks of all machines meet
    runner: Literal["auto", "v1", "v2"] = "auto"
    # false: torch.compile and graphs (slower start, faster steps); default: only on the CPU
    enforce_eager: bool | None = None
    max_num_seqs: PositiveInt = 64  # requests in one engine step
    max_num_batched_tokens: PositiveInt = 2048  # tokens in one engine step
    enable_prefix_caching: bool = True
    # `tenant`: requests reuse only blocks of the same tenant
    prefix_cache_scope: Literal["shared", "tenant"] = "shared"
    # 0: text only, and no image encoder is loaded
    images_per_prompt: Annotated[int, msgspec.Meta(ge=0, le=MAX_IMAGE + 1)] = 4
    speculative_tokens: Natural = 0  # draft tokens of a request in one engine step; 0: none
    # source of draft tokens: a look-up in the text, an EAGLE-3 head, the model's own MTP layers
    drafter: Literal["ngram", "eagle3", "mtp"] = "ngram"
    draft_model: str = ""  # the EAGLE-3 head: a checkpoint folder or hub name
    kv_cache_gib: Positive = 1.0  # CPU only
    # tokens in a block of the KV cache, of which only whole blocks are shared; default: the
    # platform's
    block_size: PositiveInt | None = None
    num_gpu_blocks: PositiveInt | None = None  # override of the KV cache's size in blocks
    # vLLM's own options: the table [engine] of the file, see `workers.engine.option_check`
    engine_options: dict[str, Any] = {}

    # LoRA adapters
    # folder below which adapters may be registered, at the same path on API and worker machines;
    # empty: none are served
    lora_dir: str = ""
    max_loras: PositiveInt = 4  # distinct adapters in one engine step
    max_cpu_loras: PositiveInt = (
        16  # adapters that each rank keeps loaded; jobs that need more wait
    )
    # the highest rank of an adapter; memory for it is reserved `max_loras` times
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 64

    # Tuned lenses
    # folder below which tuned lenses may be registered, at the same path on API and worker
    # machines; empty: `lenses` in `data_dir`
    lens_dir: str = ""

    # Sparse autoencoders
    # folder below which sparse autoencoders may be registered, at the same path on API and worker
    # machines; empty: `saes` in `data_dir`
    sae_dir: str = ""

    # vLLM's parser of the model's tool calls, such as `hermes`; empty: by the model's chat
    # template, where that is unambiguous; `none`: chats take no tools
    tool_parser: str = ""
    # installed packages whose readers and ops are loaded, separated by commas; other packages are
    # not loaded
    extensions: str = ""
    # compare rows with transformers' at start; `require`: reject a model that cannot be compared,
    # and options, versions and quantisations that are unproven
    compare: Literal["auto", "require", "off"] = "auto"
    # prove the hook points on the loaded model before its first request; false: they are served
    # with the caveat that they are unproven
    certify: bool = True

    # Gradients
    # `midstream up` also starts a worker that computes gradients with transformers
    gradients: bool = False
    # device of the gradient worker's model: cpu, cuda:N, or `auto`: the GPU with the most free
    # memory, several GPUs if one is too small, the CPU where there is none
    gradients_device: str = "auto"

    # The data plane
    # hook points to install, separated by commas: fewer cost less in compiled forward passes
    hooks: str = "all"
    # jobs whose ranks disagreed: retried in a new attempt, or failed immediately
    on_desync: Literal["retry", "fail"] = "retry"
    desync_log_s: Positive = 60.0  # minimum interval between ERROR log lines on rank disagreements
    # how often a worker looks for changes to global steering and for queries about its ranks
    steering_poll_s: Positive = 0.25
    # how long a change to global steering waits for the workers' checks; a lost worker counts for
    # `lease_s`
    steering_wait_s: Positive = 20.0
    # if `tuning.capture_queue_mib` is full: captures wait, rows are spilled to disk, or dropped
    capture_overload: Literal["block", "spill", "drop"] = "block"

    # Where captures are kept
    artifact_store: str = ""  # s3://bucket/prefix, or a folder; empty: `captures` in `data_dir`
    artifact_endpoint: str = ""  # of a store other than AWS, such as https://s3.example:9000
    artifact_region: str = ""  # of the bucket; empty: AWS_REGION, or us-east-1
    artifact_access_key: str = ""  # empty: AWS' own variables, credentials file or role
    artifact_secret_key: str = ""
    # downloads directly from the store, or only through the API
    artifact_links: Literal["presigned", "api"] = "presigned"
    # how long a presigned link is valid
    artifact_link_s: Annotated[int, msgspec.Meta(ge=1, le=7 * 24 * 3600)] = 900
    # how long a job waits in total for an unavailable store before it fails
    artifact_wait_s: Positive = 3600.0
    # endpoint in presigned links, if users reach the store under another name than the service
    artifact_public_endpoint: str = ""

    # Captures
    # quota of the artifact store; beyond it, captures are rejected; 0: no quota
    capture_quota_mib: Natural = 0
    capture_ttl_s: Natural = 0  # captures are deleted this long after the end of their job; 0: kept

    # Source runs and sweeps
    sweep_cells: PositiveInt = 20_000  # cells of one sweep
    # cells of all sweeps that have not ended; beyond it, new sweeps are rejected
    sweep_cells_waiting: PositiveInt = 200_000

    # Harvests
    # folders or bucket URIs in which harvests may be stored, separated by commas; empty: a folder
    # in `data_dir`
    harvest_stores: str = ""
    # folders or bucket URIs from which corpora may be read, separated by commas; empty: only lines
    # in the request
    harvest_sources: str = ""

    # The worker
    # `vllm`, `gradients`, or an entry point of the group `midstream.engines`; an engine named
    # `gradients` or `gradients-…` serves the model's queue of gradient jobs
    engine: str = "vllm"
    worker_id: str = ""  # stable over restarts; empty: host name and model
    capture_timeout_s: Positive = 60.0  # from the last output to the last receipt
    lease_s: Positive = 15.0  # a running job's lease; renewed every third of it
    max_attempts: PositiveInt = 5
    # jobs that were accepted for another model identity than the served one
    on_model_change: Literal["fail", "wait"] = "fail"

    # Access
    # `auto`: keys are required beyond loopback; `open`: no authentication
    auth: Literal["auto", "keys", "open"] = "auto"
    # a key with scope `admin` that is always valid: ms_<12 letters or digits>_<secret>; for the
    # first start
    admin_key: str = ""
    # likewise, with scope `observe`: for Prometheus, at `/metrics` of API and Flower
    observe_key: str = ""
    # host names and addresses of the API, separated by commas, in addition to loopback
    allowed_hosts: str = ""
    # addresses and networks, separated by commas, whose `X-Forwarded-…` headers are trusted;
    # empty: none
    trusted_proxies: str = ""
    api_key: str = ""  # sent by the Python client and the command line

    # Scheduling
    # waiting jobs over all models; beyond it submissions get 503; 0: no limit
    queue_limit: Natural = 100_000

    # Webhooks
    webhook_allow_private: bool = False  # also call loopback, private and link-local addresses

    # Observability
    log_format: Literal["text", "json"] = "text"
    # port of this process's Prometheus metrics (worker, relay, callbacks); 0: none
    metrics_port: Port = 0
    metrics_host: str = "127.0.0.1"
    grafana_url: str = ""  # URL under which users reach Grafana: a link on the page; empty: none
    otel_endpoint: str = ""  # OTLP over HTTP, such as http://127.0.0.1:4318; empty: no traces

    # HTTP
    max_wait_s: Positive = 600.0  # the longest a response is held
    # after this time, a finished job's result is deleted, and its state reads `expired`
    result_ttl_s: PositiveInt = 7 * 24 * 3600
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    fault: str = ""  # tests only: a named fault, such as `apply:rank=1`

    # Tables of the file: see their records
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
        """The URI of the artifact store for `open_store`, without credentials."""
        if not self.artifact_store.startswith("s3://"):
            return self.artifact_store or str(self.capture_root)
        options = urlencode(
            {
                name: value
                for name in ("endpoint", "region")
                if (value := getattr(self, f"artifact_{name}"))
            }
        )
        return self.artifact_store + (f"?{options}" if options else "")

    @property
    def harvest_root(self) -> Path:
        return Path(self.data_dir).resolve() / "harvests"

    @property
    def sae_root(self) -> str:
        """The folder below which sparse autoencoders may be registered."""
        return self.sae_dir or str(Path(self.data_dir).resolve() / "saes")

    @property
    def lens_root(self) -> str:
        """The folder below which tuned lenses may be registered."""
        return self.lens_dir or str(Path(self.data_dir).resolve() / "lenses")


#: Tables of the file, and their records.
TABLES: dict[str, type[Record]] = {
    "limits": DefaultLimits,
    "global_capture": GlobalCapture,
    "tuning": Tuning,
}


def load_settings(
    environ: dict[str, str] | None = None, given: Mapping[str, str] | None = None, **overrides: Any
) -> Settings:
    """Load settings from defaults, the TOML file named by `MIDSTREAM_CONFIG`, the environment,
    `given` (texts of `--set`), and `overrides`, in increasing precedence.

    Raises SettingsError naming the setting and its source.
    """
    values = chosen(environ, given, **overrides)
    nested: dict[str, Any] = {table: {} for table in TABLES}
    for name, value in values.items():
        table, _, field = name.partition(".")
        (nested[table] if field else nested)[field or name] = value
    settings = Settings(**nested | {table: of(**nested[table]) for table, of in TABLES.items()})
    _check_store(settings)
    _check_tls(settings.redis_url)
    return settings


def chosen(
    environ: dict[str, str] | None = None, given: Mapping[str, str] | None = None, **overrides: Any
) -> dict[str, Any]:
    """Return the settings that a source names, also with the default as the value; all others are
    left at their defaults. Those of a table are named `table.name`. Arguments and errors are those
    of `load_settings`.
    """
    env = dict(os.environ) if environ is None else environ
    known = known_settings()
    values: dict[str, Any] = {}
    file = env.get(FILE_VARIABLE)
    if file:
        with Translated(
            (OSError, tomllib.TOMLDecodeError),
            lambda error: SettingsError(f"{FILE_VARIABLE}={file}: {error}"),
        ):
            values.update(
                _checked(
                    _flat(_with_engine_table(tomllib.loads(Path(file).read_text()))),
                    known,
                    f"file {file}",
                )
            )
            secrets = [name for name, value in values.items() if _is_secret(name, value)]
            if secrets:
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
    for more in (
        _checked(_with_files(from_env, known), known, "environment"),
        _checked(_with_files(dict(given or {}), known), known, SET),
        _checked(arguments, known, "arguments"),
    ):
        # engine options are merged one by one, like settings
        options = {**values.get("engine_options", {}), **more.get("engine_options", {})}
        values |= more | ({"engine_options": options} if options else {})
    for name in SECRETS:
        if is_burnt(str(values.get(name, ""))):
            raise SettingsError(
                f"{name}: this value was published in Midstream's repository, so everyone knows "
                "it: create another one"
            )
    if len(to_json(values.get("engine_options", {}))) > ENGINE_OPTIONS_BYTES:
        raise SettingsError(f"engine_options: longer than {ENGINE_OPTIONS_BYTES >> 10} KiB as JSON")
    return values


def known_settings() -> dict[str, Any]:
    """Return the name of every setting, `table.name` for those of a table, → its type."""
    known: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        table = TABLES.get(field.name)
        known |= (
            {field.name: field.type}
            if table is None
            else {f"{field.name}.{of.name}": of.type for of in msgspec.structs.fields(table)}
        )
    return known


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.replace(".", "_").upper()


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return a file's contents with the entries of its tables beside the others."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in TABLES and isinstance(value, dict):
            flat |= {f"{name}.{field}": of for field, of in value.items()}
        else:
            flat[name] = value
    return flat


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
    if "://" in store and not _STORE.fullmatch(store):
        raise SettingsError(f"artifact_store={store!r}: valid: s3://bucket/prefix, or a folder")
    if settings.grafana_url and not settings.grafana_url.startswith(("http://", "https://")):
        raise SettingsError(f"grafana_url={settings.grafana_url!r}: valid: http://… or https://…")
    for name in ("artifact_endpoint", "artifact_public_endpoint"):
        if (value := getattr(settings, name)) and not _ENDPOINT.fullmatch(value):
            raise SettingsError(f"{name}={value!r}: valid: http://host:port or https://host:port")
    if bool(settings.artifact_access_key) != bool(settings.artifact_secret_key):
        raise SettingsError(
            "artifact_access_key and artifact_secret_key belong together: set both, or none"
        )


def _with_engine_table(table: dict[str, Any]) -> dict[str, Any]:
    """Return a file's contents with its table `[engine]` renamed to `engine_options`."""
    if not isinstance(table.get(ENGINE_TABLE), dict):
        return table
    if "engine_options" in table:
        raise SettingsError("engine_options and the table [engine] are both set: use one")
    return {name: value for name, value in table.items() if name != ENGINE_TABLE} | {
        "engine_options": table[ENGINE_TABLE]
    }


def engine_options(pairs: Iterable[str]) -> dict[str, Any]:
    """Parse `NAME=VALUE` of `--engine`. A value that is valid JSON (number, true, list, object) is
    decoded; any other value is text.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise SettingsError(
                f"--engine {pair!r}: write it as NAME=VALUE, such as gpu_memory_utilization=0.8"
            )
        try:
            options[name.strip().replace("-", "_")] = json.loads(value)
        except json.JSONDecodeError:
            options[name.strip().replace("-", "_")] = value
    return options


def _with_files(from_env: dict[str, str], known: dict[str, Any]) -> dict[str, str]:
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


def _check_tls(redis_url: str) -> None:
    """Raise SettingsError for TLS files in a URL without TLS, or files that do not exist: redis-py
    reads them only when it connects.
    """
    parts = urlsplit(redis_url)
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


def _checked(raw: dict[str, Any], known: dict[str, Any], source: str) -> dict[str, Any]:
    """Convert each value to its setting's type; of texts, `"false"` becomes false."""
    texts, where = source in ("environment", SET), "" if source == SET else f" ({source})"

    def label(name: str) -> str:
        written = variable(name) if source == "environment" else name
        return f"{SET} {name}" if source == SET else written

    checked = {}
    for name, value in raw.items():
        if name not in known:
            hint = suggestion(name, known)
            raise SettingsError(
                f"{label(name)}{where}: unknown setting" + (f"; {hint}" if hint else "")
            )
        try:
            if texts and name == "engine_options":
                value = json.loads(value)
            checked[name] = msgspec.convert(value, known[name], strict=not texts)
        except (msgspec.ValidationError, json.JSONDecodeError) as error:
            raise SettingsError(f"{label(name)}={value!r}{where}: {error}") from error
    return checked


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
    values = msgspec.structs.asdict(settings)
    for table in TABLES:
        of = msgspec.structs.asdict(values.pop(table))
        values |= {f"{table}.{field}": value for field, value in of.items()}
    return {
        variable(name): to_json(value).decode()
        if isinstance(value, dict)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
        for name, value in values.items()
        if value is not None and value != "" and value != {}
    }
