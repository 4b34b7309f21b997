"""Limits on the contents of one request, as constants.

Their comments are the table in `docs/reference/limits.md`. Limits that an operator may need to
change are settings instead (`max_body_mib`, `sweep_cells`, …). Lengths of texts are in characters.
msgspec checks a list's length only after building it, so `json_bounds` counts a body's values
before that.
"""

from typing import Annotated

import msgspec

# --- Any JSON document, counted in its bytes before decoding

MAX_JSON_VALUES = 1 << 18  # Values in a JSON body: elements of lists and members of objects
MAX_JSON_CONTAINERS = 1 << 15  # Objects and lists in a JSON body

# --- Numbers

MAX_COUNT = (1 << 31) - 1  # Indices, positions, token ids and counts
MAX_INT64 = (1 << 63) - 1  # Seeds, and numbers in a tenant's limits
MAX_WAIT_S = 1_000_000.0  # Seconds in `?wait=`; values above `max_wait_s` are reduced to it

# --- Names

# Names of models, consumers, spans and files; ids of jobs and deliveries; cursors, `Last-Event-ID`
MAX_NAME = 200
MAX_TAG = 64  # Tags, names of source runs, tenants and keys
MAX_MODULE_NAME = 128  # Names of modules and adapters
MAX_URL = 2048  # `callback_url` and `?url=`
MAX_PATH = 1024  # `path` of an adapter
MAX_HEADER = 4096  # Values of the headers that the API reads
MAX_IDEMPOTENCY_KEY = 255  # `Idempotency-Key`
MAX_DESCRIPTION = 1000  # `description` of a module or an adapter
# `user`, `safety_identifier`, `prompt_cache_key`, `service_tier`, `name` of a message
MAX_LABEL = 512
MAX_METADATA = 16  # Entries of `metadata`
MAX_METADATA_KEY = 64  # A key in `metadata`
MAX_METADATA_VALUE = 512  # A value in `metadata`

# --- Prompts

MAX_TEXT = 1 << 22  # A prompt as text, or the text of a message
MAX_PROMPTS = 4096  # Prompts of a job
MAX_PROMPT_TOKENS = 1 << 17  # A prompt as token ids
MAX_MESSAGES = 4096  # Messages of a conversation; parts of a message
MAX_DRAFTS = 31  # `speculative_tokens`: drafts of a request in one engine step
MAX_STOPS = 32  # Entries of `stop`, each of which is searched for after every generated token
MAX_STOP_TEXT = 256  # An entry of `stop`
MAX_STOP_TOKENS = 256  # Entries of `stop_token_ids`
MAX_LOGIT_BIAS = 1024  # Entries of `logit_bias`
MAX_ALLOWED_TOKENS = 1 << 16  # Entries of `allowed_token_ids`
MAX_BAD_WORDS = 256  # Entries of `bad_words`
MAX_CHOICES = 128  # `n`
# Tokens of all prompts, each counted `n` times, because it is stored `n` times
MAX_CHOICE_TOKENS = 1 << 20
# Bytes of an unsupported OpenAI field (`suffix`, `audio`, …) whose value has no effect
MAX_UNSERVED = 1024

# --- Tools and formats

MAX_TOOLS = 128  # Tools of a chat, and calls in a message
MAX_SCHEMA = 1 << 16  # Bytes of a JSON schema, or characters of a grammar
MAX_TOOLS_BYTES = 1 << 18  # Bytes of all tools as JSON
MAX_NESTING = 64  # Levels of a JSON schema (vLLM's own limit)
MAX_REGEX = 4096  # `regex`, and an entry of `choice`
MAX_FORMAT_CHOICES = 1024  # Entries of `choice`
MAX_TEMPLATE_OPTIONS = 1 << 12  # Bytes of `chat_template_kwargs`

# --- Images

MAX_IMAGE_TEXT = 1 << 24  # An image's `data:` URL
MAX_IMAGE_PIXELS = 1 << 25  # Pixels of an image
MAX_IMAGE = 1023  # Number of an image in a position selector

# --- Layers, positions, dimensions

MAX_LAYER = 10**6  # Index of a layer or dimension
MAX_LAYERS = 1024  # A list of layers
MAX_LAYER_TEXT = 1024  # Layers as text (`0-3,7,-1`)
MAX_HOOKS = 16  # Entries of `hooks`
MAX_DIMENSIONS = 1 << 16  # `mask`: entries of a list, or characters of a string
MAX_POSITIONS = 1 << 16  # A list of positions
MAX_SPAN_TEXT = 1 << 16  # `text` of a span
# Positions of spans of text and of turns, over all prompts and all that names them
MAX_FOUND_POSITIONS = 1 << 22
MAX_MARGIN = 1 << 16  # Positions of a window: `last`, `head`, `tail`, `before`, `after`
# `text` of a window or a trigger (characters, and tokens after a space), or one of its sequences of
# `token_ids`
MAX_AROUND = 256
MAX_SEQUENCES = 16  # Sequences of `token_ids` of a window or a trigger
# Rows of the ranks' steering table that edit one token for its request: one for each set of
# positions that may contain it. As many, in addition, for global steering, for the policies of all
# traffic, and for those that the request names
MAX_STEERING_ROWS = 4
# Distinct triggers of a request's steering, of global steering, of the policies of all traffic, and
# of those that a request names
MAX_TRIGGERS = 4
# Tokens of all prompts, each with `max_tokens`, times the sequences of a window (a text: 2)
MAX_SEARCHED = 1 << 26

# --- Captures, steering and patches

MAX_CONSUMERS = 8  # Entries of `consumers`
MAX_ENTRIES = 4096  # Entries of `steering`, of `patch` and of a module
# Edits of `steering` over all prompts of a job, including those of modules: each is stored with the
# job
MAX_JOB_EDITS = 1 << 16
MAX_PATCH_ROWS = 1 << 16  # Run rows and vectors used by `patch`, over all prompts of a job
MAX_MASKS = 256  # Distinct masks of a job, each of which is stored as a vector
MAX_NORM_ROWS = 4096  # Rows in one answer of `norms`
MAX_NORM_VALUES = 1 << 17  # Values (layers × rows) in one answer of `norms`
MAX_URL_MODULES = 16  # Modules in a URL (`?module=`)
MAX_MODULE_TEXT = 160  # A module in a URL (`NAME:SCALE`)
MAX_NORM_BYTES = 4 << 30  # Bytes of the files that one call of `norms` reads
MAX_TENSOR_DIMS = 2  # Dimensions of a tensor's `shape`
MAX_TENSOR_BYTES = 8 << 20  # Bytes of a tensor in JSON
MAX_FILE_TENSORS = 3 * MAX_ENTRIES  # Tensors of a module's file: `lowrank` has three
MAX_FILE_HEADER = 4 << 20  # Bytes of the header of a module's or an adapter's file
MAX_VECTOR_FILE = 64 << 20  # Bytes of a file of vectors that the client reads, also unpacked

# --- Readings of captured rows

# Multiply-adds of the lens and `features` of a job: rows × hidden size × vocabulary (plus hidden
# size, with `tuned` or `jacobian`), and rows × weights of the autoencoder. As many as a default
# lens that returns 16 MiB, of a model with 131,072 tokens and hidden size 4,096, rounded up to a
# power of two
MAX_READING_WORK = 1 << 48
MAX_LENS_TOP = 100  # `top_k` of a lens
MAX_LENS_TOKENS = 64  # Named tokens of a lens
MAX_LENS_TOKEN = 256  # A named token's text
MAX_TUNED = 1024  # Registered tuned lenses of a model
MAX_TUNED_BYTES = 32 << 30  # Bytes of a tuned lens

MAX_READERS = 8  # Installed readers of a request
MAX_OPTIONS = 16  # Options of an installed reader
MAX_OPTION_TEXT = 256  # An option of an installed reader that is a text
# Bytes of the registered artifacts that the options of an installed reader name, for all prompts
MAX_READER_ARTIFACTS = 16 << 20

# --- Adapters

MAX_LORAS = 1024  # Registered adapters of a model
MAX_LORA_CONFIG = 1 << 20  # Bytes of an adapter's `adapter_config.json`
MAX_LORA_BYTES = 2 << 30  # Bytes of an adapter's `adapter_model.safetensors`

# --- Sparse autoencoders

MAX_SAES = 1024  # Registered sparse autoencoders of a model
MAX_SAE_CONFIG = 1 << 20  # Bytes of a sparse autoencoder's `cfg.json`
MAX_SAE_BYTES = 8 << 30  # Bytes of a sparse autoencoder's weights
MAX_SAE_WIDTH = 1 << 21  # Features of a sparse autoencoder
MAX_FEATURES = 256  # Distinct features in one request's `steering`
MAX_FEATURE_SPECS = 64  # `features` of a request
MAX_FEATURE_TOP = 256  # `features[].top_k`
MAX_EXAMPLES = 256  # `top` of a survey: examples of each feature
MAX_EXAMPLE_CONTEXT = 64  # `context` of a survey: tokens on either side of an example
EXAMPLE_TOKEN_BYTES = 12  # of one token of an example's context, in a survey's result
# Bytes of a survey's result: features × `top` × (2 · `context` + 1) × 12 (`EXAMPLE_TOKEN_BYTES`),
# and 4 for each row of a comparison
MAX_SURVEY_BYTES = 512 << 20
MAX_SURVEYS = 64  # Surveys of a harvest

# --- Probes

MAX_PROBES = 256  # Registered probes of a model
MAX_REQUEST_PROBES = 16  # Probes that a request names
MAX_PROBE_LABELS = 64  # Labels of a probe
MAX_PROBE_BINS = 64  # Bins of the histogram, and points of the ROC curve, of a label (`held_out`)
MAX_GATE_RUNS = 1024  # Runs of steered tokens that a result names for each probe (`gate`)
# Scores of single tokens that are returned (`tokens`), over all prompts and probes of a job
MAX_PROBE_TOKENS = 1 << 18

# --- Policies

MAX_POLICIES = 64  # Registered policies of a model
# Policies that a request names, and, as many, policies of a model that apply to all traffic
MAX_REQUEST_POLICIES = 16
MAX_POLICY_ACTIONS = 8  # Actions of a policy
MAX_POLICY_VERSIONS = 8  # Versions of a policy that are kept
# Vectors, and entries, of the modules of the policies of all traffic that act, and of those that a
# request names
MAX_POLICY_VECTORS = 1024
MAX_POLICY_WINDOW = 256  # Tokens of a policy's window
MAX_LOOKS = 16  # Parts of conversations that a policy reads
POLICY_DAYS = 30  # Days, the present one included, of which a policy's prompts are counted
MAX_DECISIONS = 256  # Decisions of a policy in a result, for each prompt
MAX_LATCH_S = 30 * 24 * 3600  # Seconds of a conversation's latch (30 days)
MAX_HIT_TOKENS = 2048  # Tokens of a hit's text, up to the one at which the policy turned on
MAX_HIT_AFTER = 16  # Tokens of a hit's text after that one
MAX_HITS = 10_000  # Hits of a policy that are kept, and as many that are marked
MAX_HIT_NOTE = 1000  # Characters of a mark's `note`

# --- Sweeps

MAX_PAIRS = 256  # Pairs of a sweep
# Text of a sweep: prompts, answers and foils of all pairs; token ids count as their text
MAX_SWEEP_TEXT = 1 << 20
MAX_SPANS = 4096  # Spans of a pair
MAX_ANSWER_TEXT = 4096  # `answer` and `foil` as text
MAX_ANSWER_TOKENS = 32  # Tokens of `answer` and `foil`
MAX_NOISE = 64  # `noise` of a sweep
MAX_ATTRIBUTION_STEPS = 64  # Points of integrated gradients of an attribution
MAX_VERIFIED = 20_000  # Cells of a pair of an attribution that are computed exactly
MAX_LISTED_SCORES = 10_000  # Edges or features of a pair of an attribution that are listed
MAX_NEURON_COLUMNS = 256  # Columns of the axis `neuron`
MAX_RECEIVERS = 256  # Receivers of a path
MAX_NEURONS = 4096  # Neurons of a column that are chosen by difference

# --- Fits

MIN_FIT_EXAMPLES = 8  # Examples of each list that a fit needs, at least
MAX_FIT_EXAMPLES = 4096  # Examples of each list of a fit, and prompts of that of a lens
MAX_FIT_TOKENS = 1 << 18  # Tokens of all examples or prompts of a fit
MAX_FIT_WORK = 1 << 26  # Tokens that a fit computes, a gradient counted as two forward passes
# Tokens that a fit of a lens computes, a gradient by one output dimension counted as a pass
MAX_LENS_WORK = 1 << 28
MAX_FIT_STEPS = 2000  # `steps` of a fit
MAX_FIT_BATCH = 64  # `batch` of a fit

MAX_DOSE_PROMPTS = 64  # Texts of each list of a dose
MAX_DOSE_SCALES = 32  # `scales` of a dose
MAX_DOSE_WORDS = 64  # `words` of a dose
MAX_DOSE_TOKENS = 512  # `max_tokens` of a dose
MAX_DOSE_WORK = 1 << 20  # Tokens of all cells of a dose
MAX_TARGET_TOKENS = 512  # Tokens of a fit's `target`

# --- Harvests

MAX_HARVEST_LINES = 4096  # Documents of a harvest in the request (`source.lines`)
MAX_HARVESTS_KEPT = 4096  # Harvests that a tenant keeps, until it deletes them
MAX_SHARD_MIB = 1024  # `shards.mib` of a harvest
# Bytes of a document of a file that is harvested (a line of JSONL, a value of a table)
MAX_DOCUMENT_BYTES = 16 << 20
MAX_HARVEST_SPANS = 8  # `positions.spans` of a harvest
# Messages that are rendered to find `positions.spans` in a conversation, of which 4,096 characters
# count as one more: it is rendered several times, and for the parts `header`, `all` and
# `tool_calls` of all turns twice for each message
MAX_RENDERED_MESSAGES = 1 << 16
MAX_STREAM_CONSUMERS = 8  # `to.consumers` of a harvest's stream
MAX_STREAM_WINDOW = 1024  # `to.window` of a harvest's stream, in units
MAX_SOURCES = 64  # Entries of a tenant's `harvest_sources`

# --- Keys, webhooks, listings

MAX_SCOPES = 16  # Entries of `scopes`
MAX_EVENTS = 16  # Entries of `callback_events`
MAX_PAGE = 200  # Entries of a page

MAX_SHOWN = 200  # Characters of the request that are repeated in `field` and `instance` of an error
MAX_DETAIL = 1000  # Characters of an error's `detail`

# --- Types with these limits

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Index = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
#: `PathName`: the name of a module, adapter or the like, as part of a URL's path. `Reference`: such
#: a name in a request; submission checks that it exists.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(?!\n)$"
PathName = Annotated[str, msgspec.Meta(max_length=MAX_MODULE_NAME, pattern=NAME_PATTERN)]
Reference = Annotated[str, msgspec.Meta(max_length=MAX_MODULE_NAME)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
TokenIds = Annotated[list[Index], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL)]
UrlText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_URL)]
FolderPath = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
#: A factor of an edit, or a number in units of a feature's activation.
Factor = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_KEY)],
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_VALUE)],
    ],
    msgspec.Meta(max_length=MAX_METADATA),
]
