"""Table of architectures: where the hook points of a decoder layer are.

A tap names a module below the layer and one side of it; `sites` wraps that module when the model is
loaded. Model files stay unchanged. `layer_discovery` finds the hook points of architectures without
an entry; a hook that a model does not have is refused by name. See `docs/architectures.md`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ....schemas.base.errors import KindError, Translated
from ....schemas.prompts.selectors import HOOKS, Hook
from .config_rules import DifferentNumbersError, caveats

TapSide = Literal["input", "output"]
#: `pair`: the hook's row is the sum of two tensors, `(hidden, residual)`, that the next norm adds;
#: `single`: it is in one tensor.
TapKind = Literal["pair", "single"]
#: A hook's row is the sum of these hooks' rows, each times its multiplier.
SumLaw = Mapping[Hook, float]


@dataclass(frozen=True)
class Tap:
    """The tensor at the input or output of the module at `path` below the decoder layer; `""` is
    the layer itself.
    """

    path: str
    side: TapSide
    kind: TapKind = "single"


Taps = dict[Hook, Tap]


class UnsupportedArchitectureError(KindError):
    """The model's architecture, or this configuration of it, is not served."""

    KIND = "invalid_request"
    FIELD = "model"


@dataclass(frozen=True)
class Variant:
    """An architecture, for HF text configs whose fields equal `when`."""

    # attribute path of the decoder layers in vLLM's language model, see `sites.language_model`
    layers: str
    taps: Taps = field(default_factory=dict)
    absent: Mapping[Hook, str] = field(default_factory=dict)  # hook that does not exist → why
    backend: bool = False  # served by vLLM's Transformers backend, on transformers' own module
    when: Mapping[str, Any] = field(default_factory=dict)  # field of the HF text config → value
    refused: str = ""  # why this configuration is not supported
    #: The model's loop passes a layer's output to the next layer unchanged, and nothing else reads
    #: or writes it in between. Taps do not show this, so a test reads the loop in vLLM's source.
    #: Not so on the Transformers backend: its loop is in transformers, and decorators may wrap it.
    chained: bool = False
    measured: Mapping[Hook, SumLaw] = field(
        default_factory=dict
    )  # `laws` as measured on the loaded layers; empty: derived

    @property
    def known(self) -> bool:
        """Return whether the entry has the hook points; else they are found in the loaded model."""
        return bool(self.layers)

    @property
    def laws(self) -> dict[Hook, SumLaw]:
        """Return `post_attn` and `post_block` as sums of earlier rows of the layer, each times a
        multiplier.
        """
        derived: dict[Hook, SumLaw] = {}
        if {"pre_attn", "attn_out", "post_attn"} <= self.taps.keys():
            derived["post_attn"] = {"pre_attn": 1.0, "attn_out": 1.0}
        middle: SumLaw = (
            {"post_attn": 1.0} if "post_attn" in self.taps else {"pre_attn": 1.0, "attn_out": 1.0}
        )
        if {*middle, "mlp_out", "post_block"} <= self.taps.keys():
            derived["post_block"] = {**middle, "mlp_out": 1.0}
        return dict(self.measured) if self.measured else derived


#: Stands for architectures without an entry, until the model is loaded.
UNKNOWN = Variant("")


@dataclass(frozen=True)
class Adapter:
    """Facts about one model that `sites.install` needs."""

    architecture: str
    variant: Variant
    hidden_size: int
    num_layers: int
    caveats: tuple[str, ...] = ()  # how rows differ from transformers', see `config_rules`
    kinds: Mapping[int, Variant] = field(
        default_factory=dict
    )  # layer that differs from `variant` → its own

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """Return the hook points that every layer has, in the order of a layer's forward; all hook
        points, until the model's are known.
        """
        return tuple(hook for hook in HOOKS if hook in self.variant.taps or not self.variant.known)

    @property
    def multiplied(self) -> list[Hook]:
        """Return the hook points whose rows some layer multiplies before it adds them."""
        laws = [law for each in (self.variant, *self.kinds.values()) for law in each.laws.values()]
        return sorted({hook for law in laws for hook in law if law[hook] != 1})

    def of(self, layer: int) -> Variant:
        """Return the variant of `layer`."""
        return self.kinds.get(layer, self.variant)

    def tap(self, hook: Hook, layer: int) -> Tap:
        """Return the tap of `hook` in `layer`.

        Raises UnsupportedArchitectureError when the architecture has no such hook.
        """
        if hook not in self.variant.taps:
            why = self.variant.absent.get(hook, "it does not exist")
            raise UnsupportedArchitectureError(
                f"{self.architecture} has no {hook}: {why}; it has {', '.join(self.hooks)}"
            )
        tap = self.of(layer).taps[hook]
        # The first layer has no residual input: the stream enters it as one tensor.
        return (
            Tap(tap.path, tap.side) if layer == 0 and (tap.path, tap.side) == ("", "input") else tap
        )


def launch_groups(
    variant: Variant, hooks: Collection[Hook], *, next_layer: bool
) -> list[tuple[Hook, ...]]:
    """Return the groups of a layer's hooks that share one launch: hooks on the same tensors, with
    nothing in between. (Where one tensor is the stream, the addition lies between it and a branch.)

    The list begins after `pre_attn` and ends with the `pre_attn` of the *next* layer, which may
    share a launch with the last hooks of this layer if `next_layer`. A launch edits single tensors
    before pairs, so a hook on a single tensor never follows one on a pair.
    """
    cycle = [hook for hook in (*HOOKS[1:], HOOKS[0]) if hook in variant.taps and hook in hooks]
    groups: list[list[Hook]] = []
    for hook in cycle:
        tap = variant.taps[hook]
        last = variant.taps[groups[-1][-1]] if groups else None
        same = last is not None and (tap.path, tap.side) == (last.path, last.side)
        if hook == HOOKS[0] and last is not None:
            same = (
                next_layer
                and variant.chained
                and (tap.path, tap.side) == ("", "input")
                and (last.path, last.side) == ("", "output")
            )
        if same and last is not None and (last.kind, tap.kind) != ("pair", "single"):
            groups[-1].append(hook)
        else:
            groups.append([hook])
    return [tuple(group) for group in groups]


def stream_group(launches: Iterable[Collection[Hook]]) -> set[Hook]:
    """Return the hooks whose launches are in the family `kernels.ops.STREAM`: `post_block`, and
    those that share one of its launches.
    """
    return {hook for launched in launches if "post_block" in launched for hook in launched}


#: Llama and layers built like it: norms fuse the addition, `hidden, residual = norm(hidden,
#: residual)`.
PRE_NORM: Taps = {
    "pre_attn": Tap("", "input", "pair"),
    "attn_out": Tap("post_attention_layernorm", "input"),
    "post_attn": Tap("post_attention_layernorm", "input", "pair"),
    "mlp_in": Tap("post_attention_layernorm", "output"),
    "mlp_out": Tap("", "output"),
    "post_block": Tap("", "output", "pair"),
}
#: Gemma 2 and 3: a norm before and after each branch; the one before the MLP fuses the addition.
SANDWICH: Taps = PRE_NORM | {
    "attn_out": Tap("pre_feedforward_layernorm", "input"),
    "post_attn": Tap("pre_feedforward_layernorm", "input", "pair"),
    "mlp_in": Tap("pre_feedforward_layernorm", "output"),
}


def _materialised(attention: str, norm: str, mlp: str) -> Taps:
    """Return the taps of a layer whose stream is one tensor.

    The layer keeps the tensor that it passes to a norm as its residual, so an edit in place reaches
    both.
    """
    return {
        "pre_attn": Tap("", "input"),
        "attn_out": Tap(attention, "output"),
        "post_attn": Tap(norm, "input"),
        "mlp_in": Tap(norm, "output"),
        "mlp_out": Tap(mlp, "output"),
        "post_block": Tap("", "output"),
    }


#: transformers' pre-norm layer, as the Transformers backend runs it.
BACKEND_PRE_NORM = _materialised("self_attn", "post_attention_layernorm", "mlp")
#: transformers' layer with a norm before and after each branch.
BACKEND_SANDWICH = _materialised(
    "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
#: GPT-NeoX, one branch after the other.
NEOX = _materialised("attention", "post_attention_layernorm", "mlp")
#: OLMo 2 norms the outputs of its branches, not their inputs: the MLP reads the stream itself.
POST_NORM: Taps = {
    "pre_attn": Tap("", "input"),
    "attn_out": Tap("post_attention_layernorm", "output"),
    "post_attn": Tap("mlp", "input"),
    "mlp_out": Tap("post_feedforward_layernorm", "output"),
    "post_block": Tap("", "output"),
}
PARALLEL = "attention and MLP both read the stream that enters the layer (parallel residual)"

#: vLLM's own files of models whose layers are built like Llama's, and like Gemma 2's.
_LIKE_LLAMA = (Variant("model.layers", PRE_NORM, chained=True),)
_LIKE_GEMMA2 = (Variant("model.layers", SANDWICH, chained=True),)
#: Models with transformers' pre-norm layer that vLLM's Transformers backend serves.
_ON_BACKEND = (Variant("model.layers", BACKEND_PRE_NORM, backend=True),)
#: HF `architectures[0]` → its variants; the first whose `when` holds is taken.
ARCHITECTURES: Mapping[str, tuple[Variant, ...]] = {
    "GPT2LMHeadModel": (
        Variant("transformer.h", _materialised("attn", "ln_2", "mlp"), chained=True),
    ),
    "GPTNeoXForCausalLM": (
        Variant(
            "model.layers",
            {hook: tap for hook, tap in NEOX.items() if hook != "post_attn"},
            absent={"post_attn": PARALLEL},
            backend=True,
            when={"use_parallel_residual": True},
        ),
        Variant("model.layers", NEOX, backend=True),
    ),
    "Gemma2ForCausalLM": _LIKE_GEMMA2,
    "Gemma3ForCausalLM": _LIKE_GEMMA2,
    "GemmaForCausalLM": _LIKE_LLAMA,
    "LlamaForCausalLM": _LIKE_LLAMA,
    "MistralForCausalLM": _LIKE_LLAMA,
    "MixtralForCausalLM": _LIKE_LLAMA,
    "OPTForCausalLM": (
        Variant(
            "model.decoder.layers",
            when={"do_layer_norm_before": False},
            refused=(
                "with do_layer_norm_before=false the sums are normalised before anything reads "
                "them: there is no residual stream"
            ),
        ),
        Variant(
            "model.decoder.layers",
            _materialised("self_attn", "final_layer_norm", "fc2"),
            chained=True,
        ),
    ),
    "Olmo2ForCausalLM": (
        Variant(
            "model.layers",
            POST_NORM,
            absent={"mlp_in": "the MLP reads the stream, which is post_attn"},
            backend=True,
        ),
    ),
    "OlmoForCausalLM": _ON_BACKEND,
    "Phi3ForCausalLM": _LIKE_LLAMA,
    "Qwen2ForCausalLM": _LIKE_LLAMA,
    "Qwen3ForCausalLM": _LIKE_LLAMA,
    "Qwen3MoeForCausalLM": _LIKE_LLAMA,
    "SmolLM3ForCausalLM": _ON_BACKEND,
    "Starcoder2ForCausalLM": _ON_BACKEND,
}
#: vLLM's class for most models that its Transformers backend serves, and the common prefix of all
#: of its classes.
BACKEND_CLASS = "TransformersForCausalLM"
BACKEND_CLASSES = "Transformers"
#: `model_type` of the text config of a model that takes images → the architecture of its language
#: model, whose entry applies.
LANGUAGE_MODELS: Mapping[str, str] = {
    "cohere2": "Cohere2ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
#: `model_type`s with M-RoPE, which rotates by three positions of a token (time, height and width in
#: an image) → whether the dimensions for the three positions are interleaved.
MROPE = {"qwen2_vl_text": False, "qwen2_5_vl_text": False, "qwen3_vl_text": True}
#: `model_type`s whose first layers are followed by additions to the stream from the image encoder's
#: layers ("deepstack"), so that they are not `chained`.
DEEPSTACK = frozenset({"qwen3_vl_text"})


def describe(architecture: str, hf_config: Any, max_model_len: int = 0) -> Adapter:
    """Return the adapter of a model, before its weights are read; the variant of a model without an
    entry is `UNKNOWN` until `sites.complete`.

    `architecture`: HF's `architectures[0]`, or the backend's class, which is replaced by the
    config's; `hf_config`: transformers' config; `max_model_len`: tokens, prompt and generated.
    Raises UnsupportedArchitectureError with the reason.
    """
    if architecture.startswith(BACKEND_CLASSES):
        architecture = (hf_config.architectures or [architecture])[0]
    config = hf_config.get_text_config()
    text_type = None if config is hf_config else config.model_type
    # the model's own entry, or that of its language model, if only its config has a text config
    language_model = (
        architecture
        if architecture in ARCHITECTURES or text_type is None
        else LANGUAGE_MODELS.get(text_type, architecture)
    )
    with Translated(
        DifferentNumbersError,
        lambda error: UnsupportedArchitectureError(f"{architecture}: {error}"),
    ):
        fields = {name: getattr(config, name, None) for name in _CONFIG_FIELDS}
        variant = variant_of(language_model, fields)
        result = caveats(
            language_model,
            config,
            max_model_len,
            backend=variant.backend,
            interleaved=MROPE.get(text_type or ""),
        )
    if text_type in DEEPSTACK:
        variant = replace(variant, chained=False)
    return Adapter(architecture, variant, config.hidden_size, config.num_hidden_layers, result)


def variant_of(architecture: str, config: Mapping[str, Any]) -> Variant:
    """Return the table's entry for an architecture with this text config.

    Raises UnsupportedArchitectureError with the reason.
    """
    for variant in ARCHITECTURES.get(architecture, ()):
        if all(config.get(name) == value for name, value in variant.when.items()):
            if variant.refused:
                raise UnsupportedArchitectureError(f"{architecture}: {variant.refused}")
            return variant
    return UNKNOWN


#: The config fields that entries depend on.
_CONFIG_FIELDS = frozenset(
    name for variants in ARCHITECTURES.values() for variant in variants for name in variant.when
)
