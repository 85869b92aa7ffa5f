import json
import threading
import time

import pytest
from p2pshard_node.gateway import tokenizer as gateway_tokenizer
from p2pshard_node.gateway.tokenizer import TextModel, load_text_model
from tokenizers import Tokenizer, processors

from p2pshard.errors import ContextExceeded, ModelCorrupt, UnsupportedModel
from p2pshard.models.manifest import Manifest
from tests.fake_driver import MemoryStore, byte_tokenizer

BOS = 256
CONTEXT = 64


def with_post_processor() -> bytes:
    tokenizer = Tokenizer.from_buffer(byte_tokenizer())
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
    )
    return str(tokenizer.to_str()).encode()


@pytest.mark.parametrize(
    ("own", "add_bos", "expected"),
    [(False, False, []), (False, True, [BOS]), (True, True, [BOS]), (True, False, [])],
)
def test_bos_is_added_once_where_the_model_wants_it(own: bool, add_bos: bool, expected: list[int]) -> None:
    tokenizer = with_post_processor() if own else byte_tokenizer()
    text = TextModel(MemoryStore(add_bos=add_bos).manifest, tokenizer)
    assert text.encode("hi", CONTEXT) == [*expected, *b"hi"]
    assert text.encode_rendered("<|endoftext|>hi", CONTEXT) == [
        BOS,
        *b"hi",
    ]  # the template has written its own


def test_bos_as_transformers_adds_it(tmp_path: object) -> None:
    from transformers import PreTrainedTokenizerFast

    for own in (False, True):
        for add_bos in (False, True):
            data = with_post_processor() if own else byte_tokenizer()
            theirs = PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer.from_buffer(data), bos_token="<|endoftext|>", add_bos_token=add_bos
            )
            ours = TextModel(MemoryStore(add_bos=add_bos).manifest, data)
            for prompt in ("hi", "", "<|endoftext|>hi"):
                assert ours.encode(prompt, CONTEXT) == theirs(prompt)["input_ids"], (own, add_bos, prompt)


def test_the_bytes_of_a_token() -> None:
    text = TextModel(MemoryStore().manifest, byte_tokenizer())
    assert [text.token_bytes(i) for i in (0x61, 0x20, 0xC3, 258, 9999)] == [
        b"a",
        b" ",
        b"\xc3",
        b"<|im_end|>",
        b"",
    ]


def test_other_threads_run_while_a_text_is_encoded() -> None:
    text = TextModel(MemoryStore().manifest, byte_tokenizer())
    done, longest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest
        while not done.is_set():
            before = time.perf_counter()
            time.sleep(0.002)
            longest = max(longest, time.perf_counter() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    ids = text.encode("a" * (1 << 20), 1 << 20)
    took = time.perf_counter() - began
    done.set()
    watcher.join()
    assert ids == [97] * (1 << 20)
    assert longest < took / 3, (longest, took)


def test_what_is_far_too_long_costs_no_more_than_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_tokenizer, "_PIECE_CHARS", 100)
    text = TextModel(MemoryStore().manifest, byte_tokenizer())
    encoded: list[str] = []
    ids = text._ids
    monkeypatch.setattr(text, "_ids", lambda part, special: encoded.append(part) or ids(part, special))
    for encode in (text.encode, text.encode_rendered):
        encoded.clear()
        with pytest.raises(ContextExceeded, match="1000000 characters, and its first 300 alone") as refused:
            encode("x" * 1_000_000, 140)
        assert refused.value.details["prompt_tokens"] == 300
        assert encoded == ["x" * 100] * 3
    assert text.encode("x" * 250, 140) == [*b"x" * 250]  # its exact length is for the caller to judge


def test_what_cannot_be_read_is_said() -> None:
    with pytest.raises(ModelCorrupt, match="not a tokenizer"):
        TextModel(MemoryStore().manifest, b"{}")

    class Without(MemoryStore):
        def get(self, digest: str) -> Manifest | None:
            return Manifest("gguf", {}, (), "")

    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        load_text_model(Without(), "x")
    assert load_text_model(MemoryStore(), "another digest") is None


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m-instruct",
        pytest.param("gemma3-270m", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_real_tokens_join_to_the_text(name: str) -> None:
    from tests.unit.text_models import text_model

    text = text_model(name)
    prompt = "Grüße, 世界! 😀\tdef f(x):\n    return x"
    ids = text.encode_rendered(prompt, CONTEXT)
    assert b"".join(text.token_bytes(i) for i in ids).decode() == prompt
    assert text.decode(ids) == prompt
    assert json.dumps(text.special_tokens)
