"""Small random checkpoints of real architectures, and what transformers says their residual stream is."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

#: (layer, vector `[hidden]` to add, positions or None for all)
Edit = tuple[int, np.ndarray, list[int] | None]

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
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return _save(LlamaForCausalLM(config).float(), path)


def tiny_qwen3(path: Path) -> Path:
    """Qwen3, 4 layers, hidden 64, head counts that split over two ranks, fp32."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    return _save(Qwen3ForCausalLM(config).float(), path)


class Reference:
    """transformers on the same checkpoint, with forward hooks on the decoder layers."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32):
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        self._layers = self._model.model.layers

    def post_block(self, token_ids: list[int], edits: Sequence[Edit] = ()) -> dict[int, np.ndarray]:
        """Layer → stream leaving the block `[tokens, hidden]` float32, before this layer's own edits."""
        streams: dict[int, np.ndarray] = {}
        handles = [
            layer.register_forward_hook(self._hook(number, streams, [edit for edit in edits if edit[0] == number]))
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
    def _hook(number: int, streams: dict[int, np.ndarray], edits: list[Edit]) -> object:
        def hook(_module: object, _inputs: object, output: object) -> object:
            stream = output[0] if isinstance(output, tuple) else output
            streams[number] = stream[0].float().numpy().copy()
            edited = stream.clone()
            for _, vector, positions in edits:
                where = slice(None) if positions is None else positions
                edited[:, where] += torch.from_numpy(vector).to(edited.dtype)
            return (edited, *output[1:]) if isinstance(output, tuple) else edited

        return hook
