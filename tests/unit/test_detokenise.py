from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from p2pshard_node.gateway.detokenise import Detokeniser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.fake_driver import byte_tokenizer


def sentencepiece() -> Tokenizer:
    """A Llama-2 like tokenizer: byte fallback, a space before the first word that is stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁the",
        "▁cat",
        "s",
        "é",
        "▁▁",
        "語",
    ]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTES = Tokenizer.from_buffer(byte_tokenizer())
PIECES = sentencepiece()


def specials(tokenizer: Tokenizer) -> set[int]:
    return {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    one = Detokeniser(lambda i: tokenizer.decode(i, skip_special_tokens=True), specials(tokenizer))
    return [*(one.push([i]) for i in ids), one.finish()]


def check(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(list(ids), skip_special_tokens=True)
    whole = Detokeniser(lambda i: tokenizer.decode(i, skip_special_tokens=True), specials(tokenizer))
    assert whole.push(ids) + whole.finish() == "".join(pieces)


@given(st.lists(st.integers(0, 258), max_size=80))
@example([0xF0, 0x9F, 0x98, 0x80] * 20)
@example([0xC3] * 40)
@example([0xE2, 0x82, 256, 0xAC])
def test_any_bytes_give_the_text_of_all_of_them(ids: list[int]) -> None:
    check(BYTES, ids)


@given(st.text(max_size=60))
def test_text_comes_back_without_a_broken_character(text: str) -> None:
    ids = [*text.encode()]
    check(BYTES, ids)
    assert "\ufffd" in text or not any("\ufffd" in p for p in pieces_of(BYTES, ids))


@given(
    st.lists(
        st.one_of(
            st.sampled_from([259, 260, 261, 262, 263, 264, 265, 1, 2]),
            st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), min_size=1, max_size=2),
        ),
        max_size=40,
    )
)
def test_byte_fallback_pieces_give_the_text_of_all_of_them(parts: list[int | str]) -> None:
    ids = [i for p in parts for i in ([p] if isinstance(p, int) else [3 + b for b in p.encode()])]
    check(PIECES, ids)


def test_a_byte_run_that_is_no_utf8_never_takes_back_what_was_given() -> None:
    run = [3 + 0x41, 3 + 0x42, 3 + 0xFF, 3 + 0x43, 260]  # AB, a broken byte, C, " the"
    pieces = pieces_of(PIECES, run)
    assert pieces[:2] == ["A", "B"] and "".join(pieces).endswith(" the") and "\ufffd" in "".join(pieces)


def test_an_emoji_is_held_until_it_is_whole() -> None:
    assert pieces_of(BYTES, [*"a😀b".encode()]) == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_ends_the_text_as_a_replacement() -> None:
    assert pieces_of(BYTES, [0x61, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_special_tokens_have_no_text() -> None:
    assert "".join(pieces_of(BYTES, [257, 0x61, 258])) == "a"


def test_the_window_stays_small() -> None:
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return str(BYTES.decode(list(ids)))

    one = Detokeniser(decode)
    for token in [*("word " * 400).encode()]:
        one.push([token])
    assert max(lengths) <= 20


@pytest.mark.model
@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m-instruct",
        pytest.param("gemma3-270m", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b-instruct", marks=pytest.mark.slow),
    ],
)
def test_real_tokenizers(name: str) -> None:
    from tests.unit.text_models import text_model

    tokenizer = text_model(name)._tokenizer
    size = tokenizer.get_vocab_size()

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, size - 1), max_size=60))
    def random_ids(ids: list[int]) -> None:
        joined = "".join(pieces_of(tokenizer, ids))
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        # A run of byte pieces that is no UTF-8 is the one thing that decoding rewrites; a stream cannot take
        # back.
        assert joined == whole or ("\ufffd" in whole and "ByteFallback" in str(tokenizer.decoder))

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=60))
    def any_text(text: str) -> None:
        check(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids)

    random_ids()
    any_text()
