"""Small random checkpoints of real architectures, and what transformers says their residual stream is."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 512
LAYERS = 4
HIDDEN = 64


def _tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w1").save_pretrained(path)


def _save(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    _tokenizer(path)
    return path


def tiny_llama(path: Path) -> Path:
    """Llama, 4 layers, hidden 64, grouped-query attention, fp32; weights large enough that layers differ visibly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=160, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.15, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=False,
    )
    return _save(LlamaForCausalLM(config).float(), path)


def tiny_qwen3(path: Path) -> Path:
    """Qwen3, 4 layers, hidden 64, head counts that split over two ranks, fp32."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.15, eos_token_id=1, bos_token_id=None,
        tie_word_embeddings=False,
    )
    return _save(Qwen3ForCausalLM(config).float(), path)


class Reference:
    """transformers on the same checkpoint, with forward hooks on the decoder layers."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32):
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        self._layers = self._model.model.layers

    def post_block(
        self, token_ids: list[int], steer: dict[int, np.ndarray] | None = None, steered: list[int] | None = None
    ) -> dict[int, np.ndarray]:
        """Layer → stream leaving the block `[tokens, hidden]` float32, before this layer's own edit.

        `steer`: layer → vector added at positions `steered` (all when None).
        """
        streams: dict[int, np.ndarray] = {}
        handles = [
            layer.register_forward_hook(self._hook(number, streams, (steer or {}).get(number), steered))
            for number, layer in enumerate(self._layers)
        ]
        try:
            with torch.no_grad():
                self.logits = self._model(torch.tensor([token_ids])).logits[0].float().numpy()
        finally:
            for handle in handles:
                handle.remove()
        return streams

    @staticmethod
    def _hook(number: int, streams: dict[int, np.ndarray], vector: np.ndarray | None, steered: list[int] | None) -> object:
        def hook(_module: object, _inputs: object, output: object) -> object:
            stream = output[0] if isinstance(output, tuple) else output
            streams[number] = stream[0].float().numpy().copy()
            if vector is None:
                return output
            edited = stream.clone()
            where = slice(None) if steered is None else steered
            edited[:, where] += torch.from_numpy(vector).to(edited.dtype)
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook
