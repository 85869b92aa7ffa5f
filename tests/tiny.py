"""A tiny random model as a Hugging Face directory, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json and tokenizer_config.json of 256 bytes and three special tokens; the vocabulary's size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "chat_template": TEMPLATE,
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return len(alphabet) + len(SPECIAL)


def write_tiny_llama(
    folder: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    inner: int | None = None,
    head_width: int | None = None,
    context: int = 2048,
    seed: int = 0,
    tied: bool = False,
    shards: int = 1,
) -> Path:
    """Save a random llama of 4 heads and 2 KV heads to `folder`, in `shards` files or so. Its greedy text does not soon end.

    ``inner`` (default: twice `hidden`) and ``head_width`` (a quarter of it) keep a wide model small.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=inner or 2 * hidden, num_hidden_layers=layers,
        head_dim=head_width or hidden // 4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context, tie_word_embeddings=tied,
        eos_token_id=vocabulary - 1, bos_token_id=vocabulary - 3, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # large weights give text that depends on every layer
                parameter.mul_(6.0)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=f"{size // shards // 1000 + 1}KB" if shards > 1 else "5GB")
    return folder


def reference_tokens(
    folder: Path, prompt_ids: list[int], count: int, *, eos: tuple[int, ...] = ()
) -> list[int]:
    """Greedy tokens of the same weights in one process of plain transformers (float32)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids, given = list(prompt_ids), []
    with torch.no_grad():
        for _ in range(count):
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
            given.append(token)
            ids.append(token)
            if token in eos:
                break
    return given
