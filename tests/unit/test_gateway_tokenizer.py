import json

import pytest
from p2pshard_node.gateway.tokenizer import TextModel, load_text_model
from tokenizers import Tokenizer, processors

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.manifest import Manifest
from tests.fake_driver import MemoryStore, byte_tokenizer

BOS = 256


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
    assert text.encode("hi") == [*expected, *b"hi"]
    assert text.encode_rendered("<|endoftext|>hi") == [BOS, *b"hi"]  # the template has written its own


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
                assert ours.encode(prompt) == theirs(prompt)["input_ids"], (own, add_bos, prompt)


def test_the_bytes_of_a_token() -> None:
    text = TextModel(MemoryStore().manifest, byte_tokenizer())
    assert [text.token_bytes(i) for i in (0x61, 0x20, 0xC3, 258, 9999)] == [
        b"a",
        b" ",
        b"\xc3",
        b"<|im_end|>",
        b"",
    ]


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
    ids = text.encode_rendered(prompt)
    assert b"".join(text.token_bytes(i) for i in ids).decode() == prompt
    assert text.decode(ids) == prompt
    assert json.dumps(text.special_tokens)
