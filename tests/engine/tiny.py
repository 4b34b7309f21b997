"""Small random checkpoints of the architectures that we serve: 4 layers, hidden 64, fp32, and every
weight matters.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 512
LAYERS = 4
HIDDEN = 64
#: Window of sliding attention, where a model has it: shorter than the tests' prompts.
WINDOW = 16
#: Standard deviation of fresh weights: large enough that every one of them matters.
INITIALIZER = 0.15

_AS_IT_IS: Mapping[str, float] = {}

#: Of every config that knows these words. Head size 32 is the least that vLLM's CPU attention
#: takes.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 4096,
    "initializer_range": INITIALIZER,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = _COMMON | {
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to be made: transformers' config class and its arguments; `architecture` is what
    vLLM looks up.
    """

    architecture: str
    config: str
    options: dict[str, Any]

    def hf_config(self) -> Any:
        """transformers' config, as vLLM reads it from the checkpoint."""
        return getattr(transformers, self.config)(**self.options, architectures=[self.architecture])

    def make(self, path: Path) -> Path:
        """Write it, with a tokenizer of 512 words, unless it is there; returns `path`.

        The weights depend on the options only.
        """
        seed = zlib.crc32(repr((self.architecture, sorted(self.options.items()))).encode())
        return write(
            path,
            getattr(transformers, self.architecture),
            self.hf_config(),
            self.architecture,
            seed,
        )


def write(
    path: Path,
    kind: Any,
    config: Any,
    architecture: str,
    seed: int,
    tamed: Mapping[str, float] = _AS_IT_IS,
) -> Path:
    """Write a checkpoint of transformers' class `kind`, which vLLM is to look up as `architecture`,
    unless it is there; its path.

    `tamed`: parts of the names of parameters, and what those are multiplied with.
    """
    if (path / "config.json").exists():
        return path
    torch.manual_seed(seed)
    model = kind(config)
    own = {name: parameter.dtype for name, parameter in model.named_parameters()}
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Fresh norms and biases are ones and zeros: a missing one would not be seen.
            if parameter.ndim == 1:
                parameter += (0.2 if "norm" in name or ".ln_" in name else 0.1) * torch.randn_like(
                    parameter
                )
            elif not parameter.isfinite().all() or parameter.std() == 0:
                parameter.normal_(0, INITIALIZER)
            for part, factor in tamed.items():
                if part in name:
                    parameter *= factor
            parameter.copy_(parameter.to(own[name]))  # some are held in bf16 in any model
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of a router
                buffer.copy_(0.1 * torch.randn_like(buffer))
    save_tokenizer(path)
    model.save_pretrained(path)
    written = json.loads((path / "config.json").read_text()) | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(written, indent=1))
    return path


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", eos_token="w1"
    ).save_pretrained(path)


def _llama_like(name: str, **options: Any) -> Checkpoint:
    return Checkpoint(f"{name}ForCausalLM", f"{name}Config", _GROUPED | {"head_dim": 32} | options)


def _narrow(name: str, **options: Any) -> Checkpoint:
    """Of those whose heads share `hidden_size`."""
    return Checkpoint(
        f"{name}ForCausalLM",
        f"{name}Config",
        _GROUPED | {"num_attention_heads": 2, "num_key_value_heads": 1} | options,
    )


#: Name → checkpoint. Every entry of `architectures.ARCHITECTURES` is served by at least one of
#: them.
CHECKPOINTS: dict[str, Checkpoint] = {
    "llama": _llama_like("Llama"),
    "mistral": _llama_like("Mistral", sliding_window=WINDOW),
    "qwen2": _narrow("Qwen2"),
    "qwen3": _llama_like("Qwen3"),
    "qwen3-moe": _llama_like(
        "Qwen3Moe",
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    ),
    "mixtral": _llama_like("Mixtral", **_EXPERTS),
    "phi3": _narrow("Phi3"),
    "gemma": _llama_like("Gemma", tie_word_embeddings=True),
    "gemma2": _llama_like(
        "Gemma2",
        tie_word_embeddings=True,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        sliding_window=WINDOW,
    ),
    "gemma3": Checkpoint(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _GROUPED
        | {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": WINDOW,
        }
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "opt": Checkpoint(
        "OPTForCausalLM",
        "OPTConfig",
        _COMMON | {"num_attention_heads": 2, "ffn_dim": 160, "word_embed_proj_dim": HIDDEN},
    ),
    "gpt2": Checkpoint(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": 2,
            "n_positions": 4096,
            "tie_word_embeddings": True,
        }
        | {
            key: _COMMON[key]
            for key in ("vocab_size", "initializer_range", "eos_token_id", "bos_token_id")
        },
    ),
    "olmo": _narrow("Olmo"),
    "olmo2": _narrow("Olmo2"),
    "gpt-neox": Checkpoint(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _COMMON
        | {"num_attention_heads": 2, "intermediate_size": 160, "use_parallel_residual": True},
    ),
    "gpt-neox-sequential": Checkpoint(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        _COMMON
        | {"num_attention_heads": 2, "intermediate_size": 160, "use_parallel_residual": False},
    ),
    "smollm3": _narrow("SmolLM3"),
    "starcoder2": _narrow("Starcoder2", sliding_window=None),
}
#: Served by nothing: named in tests of what is refused.
REFUSED: dict[str, Checkpoint] = {
    "opt-post-norm": Checkpoint(
        "OPTForCausalLM", "OPTConfig", CHECKPOINTS["opt"].options | {"do_layer_norm_before": False}
    ),
    "gpt2-by-layer": Checkpoint(
        "GPT2LMHeadModel",
        "GPT2Config",
        CHECKPOINTS["gpt2"].options | {"scale_attn_by_inverse_layer_idx": True},
    ),
    "bloom": Checkpoint(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": 2, "n_head": 2},
    ),
}


#: Served, and said to differ from transformers in some of its rows.
CAVEATS: dict[str, Checkpoint] = {
    "phi3-longrope": _narrow(
        "Phi3",
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.0] * 16,
            "long_factor": [4.0 + place for place in range(16)],
        },
    ),
}


def checkpoint(name: str, path: Path) -> Path:
    """Write the named checkpoint to `path`, unless it is there."""
    return (CHECKPOINTS | REFUSED | CAVEATS)[name].make(path)
