"""Tokenizers built from GGUF metadata, against transformers and against the models' own rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from p2pshard_node.models.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from tokenizers import Tokenizer

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.gguf import read_gguf
from tests.unit.gguf_files import TINY_LLAMA, tiny_llama_tensors, write_gguf
from tests.unit.text_models import model_path

TEXTS = [
    "",
    "Hello world",
    "  leading",
    "trailing  ",
    "tabs\t\tand\n\nnewlines\r\n",
    "don't I'LL we've",
    "12345 3.14 1,000 0x7f",
    "ünïcödé 中文 日本語 한국어 Ωμέγα",
    "👩‍👩‍👧 🏳️‍🌈 and e-mail",
    "def f(x):\n    return x**2  # comment\n",
    "\u00a0\u200b\ufeff\u2028",
    "a" * 50,
    " " * 17 + "x",
    "\x00\x01\x7f",
    "  \n  \n x",
    "\u2581x\u2581",
    "http://a.b/c?d=e&f=[g]{h}",
    "<table><tr><td>1</td></tr>",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<start_of_turn>user\nhi<end_of_turn>\n<bos><eos><pad><unused3>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
]


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m-instruct",
        pytest.param("gemma3-270m", marks=pytest.mark.slow),  # transformers takes its time for 262k tokens
        pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.slow),
    ],
)
def test_encodes_and_decodes_as_transformers_does(name: str) -> None:
    from transformers import AutoTokenizer

    path = model_path(name)
    made = gguf_tokenizer(read_gguf(path))
    ours = Tokenizer.from_str(made.json)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    assert made.tokens["bos_token"] == theirs.bos_token
    assert made.tokens["eos_token"] == theirs.eos_token
    assert made.tokens["add_bos"] == (theirs.encode("x")[0] == made.tokens["bos_id"])
    assert made.chat_template == (theirs.chat_template or "")
    expected = {"smollm2-135m-instruct": [0, 2], "gemma3-270m": [1, 106]}.get(name, [151643, 151645])
    assert made.tokens["eos_ids"] == expected


@pytest.mark.slow
@pytest.mark.model
def test_where_we_follow_the_models_own_tokenizer() -> None:
    """transformers leaves these out when it reads a GGUF; the tokenizers as published have them."""
    qwen = Tokenizer.from_str(gguf_tokenizer(read_gguf(model_path("qwen2.5-coder-1.5b-instruct"))).json)
    assert qwen.encode("e\u0301").ids == qwen.encode("é").ids
    smollm = Tokenizer.from_str(gguf_tokenizer(read_gguf(model_path("smollm2-135m-instruct"))).json)
    assert [smollm.id_to_token(i) for i in smollm.encode(" 2024").ids] == ["Ġ", "2", "0", "2", "4"]


def build(tmp_path: Path, **metadata: Any) -> GgufTokenizer:
    """Tokenizer of a file whose vocabulary is replaced by the metadata given."""
    metadata = {f"tokenizer.{key.replace('__', '.')}": value for key, value in metadata.items()}
    path = write_gguf(
        tmp_path / "t.gguf", tiny_llama_tensors(), {**TINY_LLAMA, **metadata}, tokenizer=not metadata
    )
    return gguf_tokenizer(read_gguf(path))


def test_a_small_byte_level_vocabulary(tmp_path: Path) -> None:
    made = build(tmp_path)
    tokenizer = Tokenizer.from_str(made.json)
    encoded = tokenizer.encode("hello<|im_end|><think>")
    assert encoded.tokens == ["hell", "o", "<|im_end|>", "<think>"]
    assert tokenizer.decode(encoded.ids) == "hello<think>", "a control token is special, a user's own is text"
    text = "é\u0000 \U0001f600 <|im_x|>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert made.tokens == {
        "eos_ids": [260],
        "bos_id": 259,
        "add_bos": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": None,
    }


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{b:02X}>" for b in range(256)),
    "\u2581",
    "a",
    "b",
    "ab",
    "\u2581ab",
    "\u2581a",
]
SCORES = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -6.0, -5.0]
SPM = {
    "ggml__model": "llama",
    "ggml__tokens": PIECES,
    "ggml__scores": SCORES,
    "ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
    "ggml__bos_token_id": 1,
    "ggml__eos_token_id": 2,
    "ggml__unknown_token_id": 0,
}


def test_a_small_sentencepiece_vocabulary(tmp_path: Path) -> None:
    made = build(tmp_path, **SPM)
    assert (made.tokens["add_bos"], made.tokens["eos_ids"]) == (True, [2])
    tokenizer = Tokenizer.from_str(made.json)
    # 'a'+'b' (score -4) joins before the space and 'a' (-5), and the space joins last
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["\u2581ab"]
    assert tokenizer.encode("aé", add_special_tokens=False).tokens == ["\u2581a", "<0xC3>", "<0xA9>"]
    for text in ("ab ab", "é"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_no_space_is_put_before_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(build(tmp_path, **SPM, ggml__add_space_prefix=False).json)
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == ["ab"]
    assert tokenizer.decode(tokenizer.encode("ab b").ids) == "ab b"


def test_unknown_kinds_and_splits_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'rwkv'"):
        build(tmp_path, **{**SPM, "ggml__model": "rwkv"})
    gpt2 = {"ggml__model": "gpt2", "ggml__tokens": ["a", "aa"], "ggml__merges": ["a a"]}
    with pytest.raises(UnsupportedModel, match="'martian'"):
        build(tmp_path, **gpt2, ggml__pre="martian")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ggml__tokens": "x"}, "no vocabulary"),
        ({"ggml__scores": [0.0]}, "scores"),
        ({"ggml__token_type": [1]}, "1 token types for 265"),
        ({"ggml__eos_token_id": 265}, "265 of 265 tokens"),
        ({"ggml__model": "gpt2"}, "no merges"),
        ({"ggml__model": "gpt2", "ggml__merges": ["a ab"]}, "merge 'a' 'ab'"),
        ({"ggml__model": "gpt2", "ggml__merges": ["ab"]}, "merge 'ab' ''"),
    ],
)
def test_broken_metadata_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelCorrupt, match=words):
        build(tmp_path, **{**SPM, **change})


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, p2pshard_node.models.store, p2pshard.models.pull;"
        "assert not {'torch', 'transformers', 'gguf'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
