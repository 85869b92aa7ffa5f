"""GGUF tokenizer metadata → tokenizer.json, with the ``tokenizers`` library alone.

Byte-level BPE (``gpt2``) splits text as ``tokenizer.ggml.pre`` says; an unknown name is refused, since a
wrong split gives wrong tokens without any error. SentencePiece BPE (``llama``) has no merges in the file;
they are recovered from the vocabulary's scores, or from its order for Gemma, whose scores say nothing.

Where llama.cpp and a model's own tokenizer differ, the latter is followed: Qwen's text is normalised (NFC),
SmolLM's digits are those of Unicode, so that fractions and superscripts stand alone too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.gguf import GgufModel

__all__ = ["GgufTokenizer", "gguf_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_GPT2 = frozenset({"", "default", "gpt-2", "phi-2", "olmo", "jina-es", "jina-de", "mpt", "trillion"})
_GPT2_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "granite-docling"})
_WHOLE_WORDS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "gpt-4o", "llama4"}
)
"""A piece that is itself in the vocabulary is one token, whatever the merges say."""
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
_ADDS_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
"""Where the file has no ``add_bos_token``, as llama.cpp decides."""

_ENDS = frozenset(
    {
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
        "<|end_of_text|>", "<|eom_id|>", "< EOT >", "_<EOT>", "<|end_of_turn|>", "<eos>", "</s>",
    }
)  # fmt: skip
"""Control tokens that end a turn in whatever model has them (llama.cpp's end-of-generation list)."""


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer and what goes with it."""

    json: str
    """tokenizer.json, without a post-processor: `tokens` says whether to begin with a BOS."""
    tokens: dict[str, Any]
    """As `p2pshard.models.manifest.Manifest.tokens`."""
    chat_template: str


def _alphabet() -> list[str]:
    """GPT-2's printable spelling of each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    spelling, extra = [""] * 256, 0
    for byte in range(256):
        if byte in plain:
            spelling[byte] = chr(byte)
        else:
            spelling[byte], extra = chr(256 + extra), extra + 1
    return spelling


def _recovered_merges(
    pieces: Sequence[str], vocab: dict[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that a SentencePiece vocabulary implies: every split of a piece into two, best piece first.

    Ties go to the longer left half, then to the lower ids, as transformers orders them.
    """
    splits = []
    for index, piece in enumerate(pieces):
        local = [
            (vocab[piece[:cut]], vocab[piece[cut:]], cut)
            for cut in range(1, len(piece))
            if piece[:cut] in vocab and piece[cut:] in vocab
        ]
        splits += [(scores[index], cut, len(piece) - cut, left, right) for left, right, cut in sorted(local)]
    splits.sort(key=lambda s: s[:3], reverse=True)
    return [(pieces[left], pieces[right]) for *_, left, right in splits]


def _byte_level(tokens: list[str], merges: list[str], pre: str, where: str) -> Tokenizer:
    spelling = _alphabet()
    known = set(spelling)
    vocab = {
        t if known.issuperset(t) else "".join(spelling[b] for b in t.encode()): index
        for index, t in enumerate(tokens)
    }
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in merges)]
    for left, right in pairs:
        if not (left in vocab and right in vocab and left + right in vocab):
            raise ModelCorrupt(
                f"{where}: the merge {left!r} {right!r} is not of and into tokens of the vocabulary"
            )
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=pairs, fuse_unk=False, ignore_merges=pre in _WHOLE_WORDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated", invert=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _GPT2_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = byte_level
    else:
        raise UnsupportedModel(
            f"{where}: its tokenizer splits text by {pre!r} (tokenizer.ggml.pre): not supported"
        )
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(model: GgufModel, tokens: list[str], unk: str | None, where: str) -> Tokenizer:
    gemma = model.architecture in ("gemma", "gemma2", "gemma3")
    if gemma:  # the file spells runs of spaces as spaces, the text to look up has U+2581
        tokens = [_SPACE * len(t) if t and not t.strip(" ") else t for t in tokens]
    vocab = {token: index for index, token in enumerate(tokens)}
    stored = model.metadata.get("tokenizer.ggml.scores")
    if gemma:
        scores: Sequence[float] = range(0, -len(tokens), -1)
    elif isinstance(stored, np.ndarray) and stored.shape == (len(tokens),):
        scores = stored.tolist()
    else:
        raise ModelCorrupt(f"{where}: tokenizer.ggml.scores is missing or not as long as the vocabulary")
    merges = _recovered_merges(tokens, vocab, scores)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=unk if unk in vocab else None,
        )
    )
    prefix = model.metadata.get("tokenizer.ggml.add_space_prefix", True) is True and not gemma
    if model.architecture == "phi3":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    elif prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    if gemma:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _added(tokens: Iterable[str], types: Iterable[int], vocab: dict[str, int]) -> list[AddedToken]:
    """Control tokens (special) and user-defined ones (matched whole, kept in the text)."""
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token in vocab
    ]


def gguf_tokenizer(model: GgufModel) -> GgufTokenizer:
    """Build the tokenizer that a GGUF file describes.

    Raises:
        UnsupportedModel: a kind of tokenizer, or a way to split text, that is not supported; by name.
        ModelCorrupt: metadata that is missing or cannot be.
    """
    metadata, where = model.metadata, str(model.paths[0])
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{where}: a tokenizer of kind {kind!r} (tokenizer.ggml.model), not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelCorrupt(f"{where}: no vocabulary (tokenizer.ggml.tokens) in it")
    types = metadata.get("tokenizer.ggml.token_type")
    types = types.tolist() if isinstance(types, np.ndarray) else [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelCorrupt(f"{where}: {len(types)} token types for {len(tokens)} tokens")

    def token_id(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
            raise ModelCorrupt(f"{where}: tokenizer.ggml.{key}_token_id is {value!r} of {len(tokens)} tokens")
        return value

    def token(key: str) -> str | None:
        index = token_id(key)
        return None if index is None else tokens[index]

    if kind == "gpt2":
        merges = metadata.get("tokenizer.ggml.merges")
        if not isinstance(merges, list):
            raise ModelCorrupt(f"{where}: no merges (tokenizer.ggml.merges) in it")
        tokenizer = _byte_level(tokens, merges, str(pre), where)
    else:
        tokenizer = _sentencepiece(model, tokens, token("unknown"), where)
    tokenizer.add_tokens(_added(tokens, types, tokenizer.get_vocab(with_added_tokens=False)))

    ends = [token_id(key) for key in ("eos", "eot", "eom")]
    ends += [i for i, (t, k) in enumerate(zip(tokens, types, strict=True)) if k == _CONTROL and t in _ENDS]
    add_bos = metadata.get("tokenizer.ggml.add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = kind == "llama" or pre in _ADDS_BOS
    template = metadata.get("tokenizer.chat_template", "")
    return GgufTokenizer(
        json=tokenizer.to_str(),
        tokens={
            "eos_ids": sorted({i for i in ends if i is not None}),
            "bos_id": token_id("bos"),
            "add_bos": add_bos and token_id("bos") is not None,
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "pad_token": token("padding"),
        },
        chat_template=template if isinstance(template, str) else "",
    )
