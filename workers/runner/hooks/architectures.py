"""Places of the hook points in a decoder layer: a table of architectures, and what is found in the
loaded layers of all others.

A tap names a module below the layer and one side of it; `sites` wraps that module when the model is
loaded. Model files stay as they are. What the table does not have is found by `layer_probe`; a hook
that a model does not have is refused by name. See `docs/architectures.md`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....schemas.base.errors import MidstreamError
from ....schemas.prompts.selectors import HOOKS, Hook
from .config_rules import DifferentNumbersError, caveats
from .taps import Law, Tap, Taps


class UnsupportedArchitectureError(MidstreamError):
    """The model's architecture, or this configuration of it, has no table entry."""

    def __init__(self, detail: str) -> None:
        super().__init__("invalid_request", detail, field="model")


@dataclass(frozen=True)
class Variant:
    """An architecture, as far as its HF config says `when`."""

    layers: str  # attribute path of the decoder layers in vLLM's language model
    taps: Taps = field(default_factory=dict)
    absent: Mapping[Hook, str] = field(default_factory=dict)  # hook that does not exist → why
    backend: bool = False  # served by vLLM's Transformers backend, on transformers' own module
    when: Mapping[str, Any] = field(default_factory=dict)  # attributes of the HF text config
    refused: str = ""  # why this configuration is not supported
    #: The model's loop hands what a layer gives to the next one as it is, and nothing else reads or
    #: writes it in between.
    hands_on: bool = False
    stated: Mapping[Hook, Law] = field(
        default_factory=dict
    )  # where a sum has other multipliers than 1, see `laws`

    @property
    def known(self) -> bool:
        """Return whether it says where the hook points are; else they are found in the loaded
        model.
        """
        return bool(self.layers)

    @property
    def laws(self) -> dict[Hook, Law]:
        """Return what the rows of a layer add up to: `post_attn` and `post_block`, as multiples of
        rows before them.
        """
        derived: dict[Hook, Law] = {}
        if {"pre_attn", "attn_out", "post_attn"} <= self.taps.keys():
            derived["post_attn"] = {"pre_attn": 1.0, "attn_out": 1.0}
        middle: Law = (
            {"post_attn": 1.0} if "post_attn" in self.taps else {"pre_attn": 1.0, "attn_out": 1.0}
        )
        if {*middle, "mlp_out", "post_block"} <= self.taps.keys():
            derived["post_block"] = {**middle, "mlp_out": 1.0}
        return dict(self.stated) if self.stated else derived


#: Of what the table does not have, until the model is loaded.
UNKNOWN = Variant("")


@dataclass(frozen=True)
class Adapter:
    """Facts about one model that `sites.install` needs."""

    architecture: str
    variant: Variant
    hidden_size: int
    num_layers: int
    caveats: tuple[str, ...] = ()  # in what the rows differ from transformers', see `fidelity`
    kinds: Mapping[int, Variant] = field(
        default_factory=dict
    )  # layers that are built otherwise than `variant` says

    @property
    def hooks(self) -> tuple[Hook, ...]:
        """The hook points that every layer has, in the order in which a layer's forward meets them;
        all, until that is known.
        """
        return tuple(hook for hook in HOOKS if hook in self.variant.taps or not self.variant.known)

    def of(self, layer: int) -> Variant:
        """Return how `layer` is built."""
        return self.kinds.get(layer, self.variant)

    @property
    def layers(self) -> str:
        """Attribute path of the decoder layers in vLLM's language model, see
        `sites.language_model`.
        """
        return self.variant.layers

    def tap(self, hook: Hook, layer: int) -> Tap:
        """Return where `hook` of `layer` is.

        Raises UnsupportedArchitectureError when the architecture has no such hook.
        """
        if hook not in self.variant.taps:
            why = self.variant.absent.get(hook, "it does not exist")
            raise UnsupportedArchitectureError(
                f"{self.architecture} has no {hook}: {why}; it has {', '.join(self.hooks)}"
            )
        tap = self.of(layer).taps[hook]
        # Nothing is deferred yet when the stream enters the first layer: there is no separate
        # residual.
        return (
            Tap(tap.path, tap.side) if layer == 0 and (tap.path, tap.side) == ("", "input") else tap
        )


def neighbours(
    variant: Variant, hooks: Collection[Hook], *, next_layer: bool
) -> list[tuple[Hook, ...]]:
    """The launches that a layer's sites take: hooks whose tensors are those of the hook before
    them, with nothing in between.

    In the order of a forward, which begins behind `pre_attn`: that of the *next* layer closes the
    list. `next_layer`: it may share a launch with what this layer ends with. The ops edit branches
    first, so no single tensor follows a pair.
    """
    cycle = [hook for hook in (*HOOKS[1:], HOOKS[0]) if hook in variant.taps and hook in hooks]
    groups: list[list[Hook]] = []
    for hook in cycle:
        tap, last = variant.taps[hook], variant.taps[groups[-1][-1]] if groups else None
        same = last is not None and (tap.path, tap.side) == (last.path, last.side)
        if hook == HOOKS[0] and last is not None:
            same = (
                next_layer
                and variant.hands_on
                and (tap.path, tap.side) == ("", "input")
                and (last.path, last.side) == ("", "output")
            )
        if same and last is not None and (last.kind, tap.kind) != ("pair", "single"):
            groups[-1].append(hook)
        else:
            groups.append([hook])
    return [tuple(group) for group in groups]


#: Llama and what is built like it: norms fuse the addition, `hidden, residual = norm(hidden,
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
    """One tensor is the stream.

    The layer keeps what it hands to a norm as its residual, so an edit in place reaches both.
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
#: GPT-NeoX, one branch after the other.
NEOX = _materialised("attention", "post_attention_layernorm", "mlp")
#: OLMo 2 norms what the branches give, not what they get: the MLP reads the stream itself.
POST_NORM: Taps = {
    "pre_attn": Tap("", "input"),
    "attn_out": Tap("post_attention_layernorm", "output"),
    "post_attn": Tap("mlp", "input"),
    "mlp_out": Tap("post_feedforward_layernorm", "output"),
    "post_block": Tap("", "output"),
}
PARALLEL = "attention and MLP both read the stream that enters the layer (parallel residual)"

#: HF `architectures[0]` → its variants; the first whose `when` holds is taken.
ARCHITECTURES: Mapping[str, tuple[Variant, ...]] = {
    "GPT2LMHeadModel": (
        Variant("transformer.h", _materialised("attn", "ln_2", "mlp"), hands_on=True),
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
    "Gemma2ForCausalLM": (Variant("model.layers", SANDWICH, hands_on=True),),
    "Gemma3ForCausalLM": (Variant("model.layers", SANDWICH, hands_on=True),),
    "GemmaForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "LlamaForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "MistralForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "MixtralForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
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
            hands_on=True,
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
    "OlmoForCausalLM": (Variant("model.layers", BACKEND_PRE_NORM, backend=True),),
    "Phi3ForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "Qwen2ForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "Qwen3ForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "Qwen3MoeForCausalLM": (Variant("model.layers", PRE_NORM, hands_on=True),),
    "SmolLM3ForCausalLM": (Variant("model.layers", BACKEND_PRE_NORM, backend=True),),
    "Starcoder2ForCausalLM": (Variant("model.layers", BACKEND_PRE_NORM, backend=True),),
}
#: What vLLM calls the class that serves most of them through its Transformers backend; the others
#: begin alike.
BACKEND_CLASS = "TransformersForCausalLM"
BACKEND_CLASSES = "Transformers"
#: `model_type` of the text config of a model that takes images → the architecture of its language
#: model, whose entry counts.
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
#: Those that rotate by three positions of a token (time, height and width in an image) → whether
#: pairs of dimensions take turns.
THREE_POSITIONS = {"qwen2_vl_text": False, "qwen2_5_vl_text": False, "qwen3_vl_text": True}
#: Those whose stream gets what the image encoder's layers found between the first layers
#: ("deepstack"): they are not `hands_on`.
DEEPSTACK = frozenset({"qwen3_vl_text"})


def describe(architecture: str, hf_config: Any, max_model_len: int = 0) -> Adapter:
    """The adapter of a model, before its weights are read; one that the table does not have is
    `UNKNOWN` until `found.complete`.

    `architecture`: HF's `architectures[0]`, or the backend's class, whose config then says it;
    `hf_config`: transformers' config; `max_model_len`: tokens, prompt and generated. Raises
    UnsupportedArchitectureError with the reason.
    """
    if architecture.startswith(BACKEND_CLASSES):
        architecture = (hf_config.architectures or [architecture])[0]
    config = hf_config.get_text_config()
    text_type = None if config is hf_config else config.model_type
    language_model = _language_model(architecture, text_type)
    try:
        variant = variant_of(language_model, {name: getattr(config, name, None) for name in _ASKED})
        result = caveats(
            language_model,
            config,
            max_model_len,
            backend=variant.backend,
            interleaved=THREE_POSITIONS.get(text_type or ""),
        )
    except DifferentNumbersError as error:
        raise UnsupportedArchitectureError(f"{architecture}: {error}") from error
    if text_type in DEEPSTACK:
        variant = replace(variant, hands_on=False)
    return Adapter(architecture, variant, config.hidden_size, config.num_hidden_layers, result)


def _language_model(architecture: str, text_type: str | None) -> str:
    """The entry of a model: its own, or that of its language model if its config has one for
    text.
    """
    return (
        architecture
        if architecture in ARCHITECTURES or text_type is None
        else LANGUAGE_MODELS.get(text_type, architecture)
    )


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


#: The fields of a config that the table asks for.
_ASKED = frozenset(
    name for variants in ARCHITECTURES.values() for variant in variants for name in variant.when
)
