"""Limits on the contents of one request, as constants.

A test compares them with the table in `docs/http.md`. Limits that an operator may need to change
are settings instead (`max_body_mib`, `sweep_cells`, …). Lengths of texts are in characters. msgspec
checks a list's length only after building it, so `json_bounds` counts a body's values before that.
"""

from typing import Annotated

import msgspec

# --- Any JSON document, counted in its bytes before decoding

MAX_JSON_VALUES = 1 << 18  # elements and members
MAX_JSON_CONTAINERS = 1 << 15  # objects and arrays

# --- Numbers

MAX_COUNT = (1 << 31) - 1  # indices, positions, numbers of tokens
MAX_INT64 = (1 << 63) - 1  # seeds and limits of tenants
# `?wait=` and `Prefer: wait=N`; longer waits are cut to the setting `max_wait_s`
MAX_WAIT_S = 1_000_000.0

# --- Names

# of models, modules, runs, jobs, spans of a sweep and consumers, cursors and file names
MAX_NAME = 200
MAX_TAG = 64  # tags of captures, names of source runs and tenants
MAX_MODULE_NAME = 128
MAX_URL = 2048
MAX_PATH = 1024  # of the folder of an adapter or a sparse autoencoder
MAX_HEADER = 4096  # of the headers in use
MAX_IDEMPOTENCY_KEY = 255
MAX_DESCRIPTION = 1000
MAX_LABEL = 512  # OpenAI's `user`, `safety_identifier`, `prompt_cache_key`, `service_tier`
MAX_METADATA = 16  # entries; keys and values as in OpenAI's API
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

# --- Prompts

MAX_TEXT = 1 << 22  # a prompt, or a message of a conversation
MAX_PROMPTS = 4096  # of one job
MAX_PROMPT_TOKENS = 1 << 17  # token ids of one prompt
MAX_MESSAGES = 4096  # of a conversation, and parts of a message
MAX_STOPS = 32  # `stop`: each is searched for after every generated token
MAX_STOP_TEXT = 256
MAX_STOP_TOKENS = 256  # `stop_token_ids`
MAX_LOGIT_BIAS = 1024  # entries of `logit_bias`
MAX_ALLOWED_TOKENS = 1 << 16  # `allowed_token_ids`
MAX_BAD_WORDS = 256  # `bad_words`, each as long as a stop string
MAX_CHOICES = 128  # `n`: outputs of one prompt
# of all prompts of a request with `n`; each prompt counts `n` times, because it is stored `n` times
MAX_CHOICE_TOKENS = 1 << 20
# bytes of an OpenAI field that is accepted only with a value that has no effect
MAX_UNSERVED = 1024

# --- Tools and formats

MAX_TOOLS = 128  # of a chat, and calls in one message
MAX_SCHEMA = 1 << 16  # bytes of a JSON schema, and characters of a grammar, in a request
MAX_TOOLS_BYTES = 1 << 18  # of all tools together, as JSON
MAX_NESTING = 64  # levels of a JSON schema: vLLM's own limit
MAX_REGEX = 4096  # characters of `structured_outputs.regex`
MAX_FORMAT_CHOICES = 1024  # entries of `structured_outputs.choice`
MAX_TEMPLATE_OPTIONS = 1 << 12  # bytes of `chat_template_kwargs`, as JSON

# --- Images

# characters of an image's `data:` URL; `max_body_mib` limits all of them together
MAX_IMAGE_TEXT = 1 << 24
MAX_IMAGE_PIXELS = 1 << 25  # width × height of an image
MAX_IMAGE = 1023  # the largest index of an image in a prompt, counted from either end

# --- Layers, positions, dimensions

MAX_LAYER = 10**6  # the largest index of a layer or dimension, counted from either end
MAX_LAYERS = 1024  # entries of a list of layers
MAX_LAYER_TEXT = 1024  # `0-3,7,-1`
MAX_HOOKS = 16  # entries of `hooks`
MAX_DIMENSIONS = 1 << 16  # entries of a list of dimensions (`mask`), and characters of its text
MAX_POSITIONS = 1 << 16  # entries of a list of positions
MAX_SPAN_TEXT = 1 << 16
MAX_MARGIN = 1 << 16  # positions of a window before or after others
MAX_AROUND = 256  # characters, or token ids, of what a window is around
MAX_SEQUENCES = 16  # sequences of token ids of a window
# tokens of all prompts, with those generated at most, times the sequences of a window
MAX_SEARCHED = 1 << 26

# --- Captures, steering and patches

MAX_CONSUMERS = 8
# of `steering`, of `patch` and of a module; for one prompt, including the entries of its modules
MAX_ENTRIES = 4096
# of `steering` over all prompts of a job, including those of modules: each is stored with the job
MAX_JOB_EDITS = 1 << 16
# of `patch`, over all prompts of a job: each names a row of a run or a vector
MAX_PATCH_ROWS = 1 << 16
MAX_MASKS = 256  # different masks of a job: each is stored as a vector
MAX_NORM_ROWS = 4096  # positions of one answer of `GET /v1/captures/{id}/norms`
MAX_NORM_VALUES = 1 << 17  # layers × positions of one such answer
MAX_URL_MODULES = 16  # of `?module=`
MAX_MODULE_TEXT = 160  # `NAME:SCALE`
MAX_NORM_BYTES = 4 << 30  # of the files that one such answer reads and checks
MAX_TENSOR_DIMS = 2
MAX_TENSOR_BYTES = 8 << 20
MAX_FILE_TENSORS = 3 * MAX_ENTRIES  # of a module's safetensors file: `lowrank` has three
MAX_FILE_HEADER = 4 << 20  # bytes of that file's header
MAX_VECTOR_FILE = 64 << 20  # bytes of a file of vectors that the client reads, also unpacked

# --- Readings of captured rows

# multiply-adds of the lens and `features` of a job: those of a default lens that returns 16 MiB, of
# a model with 131,072 tokens and hidden size 4,096, rounded up to a power of two
MAX_READING_WORK = 1 << 48
MAX_LENS_TOP = 100  # most likely tokens of a logit lens
MAX_LENS_TOKENS = 64  # named tokens of a logit lens
MAX_LENS_TOKEN = 256  # characters of one, by its text
MAX_TUNED = 1024  # tuned lenses registered, of one model
MAX_TUNED_BYTES = 32 << 30  # of one lens's file

MAX_READERS = 8  # installed readers of one request
MAX_OPTIONS = 16  # of a reader
MAX_OPTION_TEXT = 256

# --- Adapters

MAX_LORAS = 1024  # registered, of one model
MAX_LORA_CONFIG = 1 << 20  # bytes of adapter_config.json
MAX_LORA_BYTES = 2 << 30  # of adapter_model.safetensors

# --- Sparse autoencoders

MAX_SAES = 1024  # registered, of one model
MAX_SAE_CONFIG = 1 << 20  # bytes of cfg.json
MAX_SAE_BYTES = 8 << 30  # of sae_weights.safetensors or params.npz, also once unpacked
MAX_SAE_WIDTH = 1 << 21  # features of one
MAX_FEATURES = 256  # different features in one request's steering
MAX_FEATURE_SPECS = 64  # `features` of one request
MAX_FEATURE_TOP = 256  # features returned for one token
MAX_EXAMPLES = 256  # of each feature in a survey of a harvest
MAX_EXAMPLE_CONTEXT = 64  # tokens on either side of an example
EXAMPLE_TOKEN_BYTES = 12  # of one token of an example's context, in a survey's result
MAX_SURVEY_BYTES = 512 << 20  # of a survey's result
MAX_SURVEYS = 64  # kept with one harvest

# --- Probes

MAX_PROBES = 256  # registered, of one model
MAX_REQUEST_PROBES = 16  # named by one request
MAX_PROBE_LABELS = 64  # of one probe
MAX_GATE_RUNS = 1024  # runs of tokens with gated edits, in a result for each probe
# returned scores of single tokens, over all prompts and probes of a job
MAX_PROBE_TOKENS = 1 << 18

# --- Policies

MAX_POLICIES = 64  # registered, of one model
MAX_REQUEST_POLICIES = 16  # named by one request, or applied to all traffic
MAX_POLICY_ACTIONS = 8  # of one policy
MAX_POLICY_VERSIONS = 8  # kept of one policy: the newest
MAX_POLICY_WINDOW = 256  # tokens of an aggregate
MAX_DECISIONS = 256  # in a result for each policy and prompt
MAX_LATCH_S = 30 * 24 * 3600

# --- Sweeps

MAX_PAIRS = 256
# of prompts, answers and foils of all pairs; token ids count as the text that they decode to
MAX_SWEEP_TEXT = 1 << 20
MAX_SPANS = 4096  # of a pair
MAX_ANSWER_TEXT = 4096
MAX_ANSWER_TOKENS = 32  # each costs every cell another forward pass
MAX_NOISE = 64
MAX_ATTRIBUTION_STEPS = 64  # points of integrated gradients
MAX_VERIFIED = 20_000  # cells of a pair of an attribution that are computed exactly
MAX_LISTED_SCORES = 10_000  # edges or features of a pair of an attribution
MAX_NEURON_COLUMNS = 256  # columns of the axis `neuron`
MAX_RECEIVERS = 256  # of a path
MAX_NEURONS = 4096  # neurons of a column of the axis `neuron` that are chosen by rank

# --- Fits

MIN_FIT_EXAMPLES = 8  # of each list that a fit needs
MAX_FIT_EXAMPLES = 4096  # of each list
MAX_FIT_TOKENS = 1 << 18  # of all examples
MAX_FIT_WORK = 1 << 26  # tokens that a fit computes, see `StoredModuleFit.tokens`
MAX_LENS_WORK = 1 << 28  # of a Jacobian lens, see `StoredLensFit.tokens`
MAX_FIT_STEPS = 2000
MAX_FIT_BATCH = 64

MAX_DOSE_PROMPTS = 64  # of each list of a dose
MAX_DOSE_SCALES = 32
MAX_DOSE_WORDS = 64
MAX_DOSE_TOKENS = 512  # of one continuation
MAX_DOSE_WORK = 1 << 20  # tokens of all cells
MAX_TARGET_TOKENS = 512  # of the continuation of one example

# --- Harvests

MAX_HARVEST_LINES = 4096  # documents in the request itself
# records of a tenant's harvests, until they are deleted with their files
MAX_HARVESTS_KEPT = 4096
MAX_SHARD_MIB = 1024
MAX_DOCUMENT_BYTES = 16 << 20  # of a document of a file: a line of JSONL, or a value of a table
MAX_CONSUMERS = 8  # of a harvest's stream
# units of a stream that are computed and not acknowledged
MAX_STREAM_WINDOW = 1024
MAX_SOURCES = 64  # entries of a tenant's `harvest_sources`

# --- Keys, webhooks, listings

MAX_SCOPES = 16
MAX_EVENTS = 16  # of `callback_events`
MAX_PAGE = 200  # entries of a page

#: The most characters of a client's input in an error, and of an error's whole message.
MAX_SHOWN = 200
MAX_DETAIL = 1000

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
Metadata = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_KEY)],
        Annotated[str, msgspec.Meta(max_length=MAX_METADATA_VALUE)],
    ],
    msgspec.Meta(max_length=MAX_METADATA),
]
