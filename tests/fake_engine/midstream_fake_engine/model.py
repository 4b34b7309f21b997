"""The fake engine's model: facts, tokenizer, text and residual stream."""

import hashlib
import zlib
from collections.abc import Mapping
from typing import cast

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from midstream.schemas.artifacts.loras import LoraModule, LoraSupport
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.base.version import __version__
from midstream.schemas.jobs.models import ModelInfo, TokenizerBundle, encode_bundle
from midstream.schemas.prompts.selectors import HOOKS, Hook
from midstream.schemas.requests.specs import StoredSteering
from midstream.schemas.service.global_capture import from_settings
from midstream.schemas.settings.settings import Settings
from midstream.workers.runner.files.consumers import available
from midstream.workers.runner.readings.installed_readers import LoadedReader

NUM_LAYERS = 4
HIDDEN_SIZE = 8
VOCABULARY = 256  # one token per byte, special ones aside
FAKE_LINEAR = "model.layers.*.mlp.up_proj"
LORA_SHAPE = LoraModule(inputs=HIDDEN_SIZE, outputs=HIDDEN_SIZE, layers=f"0-{NUM_LAYERS - 1}")
BOS = "<bos>"
EOS = "<eos>"
MAX_MODEL_LEN = 4096

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ "
    "message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_tokenizer(*special: str) -> Tokenizer:
    """One token per byte and nothing merged: any text survives a round trip."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special or (BOS, EOS)))
    return tokenizer


def make_bundle(tokenizer: Tokenizer) -> TokenizerBundle:
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_CHAT_TEMPLATE,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        eos_token_ids=[_token_id(tokenizer, EOS)],
    )


def identity_of(settings: Settings) -> str:
    """The identity of the fake model that the setting `model` names: another name is another
    checkpoint.
    """
    return hashlib.sha256(f"fake {settings.model}".encode()).hexdigest()


def weights_of(settings: Settings) -> int:
    """Return what decides the numbers of the fake model that the setting `model` names: what
    follows an `@` in it; 0 without one.
    """
    return zlib.crc32(settings.model.partition("@")[2].encode())


def make_info(
    settings: Settings,
    tokenizer: Tokenizer,
    bundle: TokenizerBundle,
    installed: Mapping[str, LoadedReader] | None = None,
) -> ModelInfo:
    return ModelInfo(
        name=settings.served_model,
        version=__version__,
        architecture="FakeForCausalLM",
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=settings.vllm.max_model_len or MAX_MODEL_LEN,
        dtype="float32",
        identity=identity_of(settings),
        hooks=list(HOOKS),
        tokenizer=encode_bundle(bundle)[0],
        tp=settings.vllm.tensor_parallel_size,
        pp=settings.vllm.pipeline_parallel_size,
        runner="fake",
        consumers=available(),
        memory_limit_kib=settings.tuning.memory_limit_kib,
        step_tokens=settings.vllm.max_num_batched_tokens,
        steering_rows=settings.tuning.steering_rows,
        steering_entries=settings.tuning.steering_entries,
        global_captures=from_settings(settings, NUM_LAYERS),
        grades=True,
        exits=True,
        readings={
            "lens": "pipeline stages" if settings.vllm.pipeline_parallel_size > 1 else "",
            "features": "",
            "reader": "",
        },
        extensions=[reader.facts for reader in (installed or {}).values()],
        lora=LoraSupport(max_rank=settings.vllm.max_lora_rank, modules={FAKE_LINEAR: [LORA_SHAPE]})
        if settings.vllm.max_loras
        else None,
    )


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    token_id: int | None = tokenizer.token_to_id(token)
    assert token_id is not None, f"{token!r} is in the vocabulary"
    return token_id


class Dice:
    """Deterministic tokens: lower-case letters and blanks that prompt, steering, seed and weights
    decide.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        seed: int | None,
        steering: list[StoredSteering],
        weights: int = 0,
    ):
        """`steering`: everyone's and the request's own, which do the same; `weights`: see
        `weights_of`.
        """
        steering = [msgspec.structs.replace(entry, owner="request") for entry in steering]
        self._state = zlib.crc32(to_msgpack((prompt, steering, seed)), weights)
        self._faces = [
            _token_id(tokenizer, character) for character in "Ġabcdefghijklmnopqrstuvwxyz"
        ]

    def roll(self) -> int:
        self._state = zlib.crc32(self._state.to_bytes(4, "little"))
        return self._faces[self._state % len(self._faces)]


def residual_rows(
    layer: int,
    positions: np.ndarray,
    token_ids: np.ndarray,
    hook: str = "post_block",
    weights: int = 0,
) -> np.ndarray:
    """`[positions, HIDDEN_SIZE]` float32: a value that names its hook, layer, position and token,
    so that a swap shows.

    Scaled by powers of two, so that it is exact and fits a float16 as well. Other `weights` than 0
    give the negative.
    """
    rows = layer * 1e6 + positions.astype(np.float64) * 1e3 + token_ids
    scale = 2.0 ** -(10 + HOOKS.index(cast(Hook, hook)))
    block: np.ndarray = ((rows[:, None] + np.arange(HIDDEN_SIZE) / HIDDEN_SIZE) * scale).astype(
        np.float32
    )
    return -block if weights else block
