"""Text to token ids and back with the `tokenizers` library alone: a daemon never imports transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from p2pshard.errors import ContextExceeded, ModelCorrupt, UnsupportedModel
from p2pshard.models.manifest import Manifest

from ..models.tokenizer_json import load_tokenizer, panics_as_errors
from .detokenise import Detokeniser
from .view import TextStore

__all__ = ["TextModel", "load_text_model"]

_PIECE_CHARS = 1 << 16
"""A text longer than this is measured in pieces before it is encoded whole: about 50 ms and 25 MB each."""
_MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = [b for b in range(256) if b not in set(printable)]
    return table | {chr(256 + i): b for i, b in enumerate(others)}


class TextModel:
    """Tokenizer and chat template of one manifest. Thread-safe; other threads run while a text is encoded."""

    def __init__(self, manifest: Manifest, tokenizer_json: bytes) -> None:
        """Raises `ModelCorrupt` when the bytes are no tokenizer."""
        self._where = f"tokenizer.json of manifest {manifest.digest[:12]}"
        self._tokenizer = load_tokenizer(tokenizer_json, self._where)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.manifest = manifest.digest
        self.chat_template = manifest.chat_template
        tokens = manifest.tokens
        self.eos_ids: tuple[int, ...] = tuple(int(i) for i in tokens.get("eos_ids") or ())
        self.special_tokens: dict[str, str] = {
            k: v for k, v in tokens.items() if k.endswith("_token") and isinstance(v, str)
        }
        """``bos_token``, ``eos_token`` and so on, as chat templates name them."""
        self.vocab_size = int(manifest.config.get("vocab_size") or self._tokenizer.get_vocab_size())
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        # A tokenizer.json may add the BOS itself (its post-processor), and the model's settings have the
        # last word: as transformers does, we add one that is wanted and missing (also before a text that
        # spells it out), and leave the post-processor out where it would add one that is not wanted.
        bos, wanted = tokens.get("bos_id"), bool(tokens.get("add_bos"))
        adds = bos is not None and self._tokenizer.encode("", add_special_tokens=True).ids[:1] == [int(bos)]
        self._bos: tuple[int, ...] = (int(bos),) if wanted and bos is not None and not adds else ()
        self._post_process = wanted or not adds

    def encode(self, text: str, context: int) -> list[int]:
        """Ids of a plain prompt, with BOS where the model has one.

        Raises `ContextExceeded`, before all of it is encoded, for a text of more than twice `context` tokens.
        """
        self._measure(text, context)
        return [*self._bos, *self._ids(text, self._post_process)]

    def encode_rendered(self, text: str, context: int) -> list[int]:
        """Ids of a rendered chat template: it has written its own special tokens, none is added.

        Raises as `encode` does.
        """
        self._measure(text, context)
        return self._ids(text, False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        with panics_as_errors(self._where):
            # Not encode(): it keeps the interpreter's lock, 0.7 s for each MB.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)

    def _measure(self, text: str, context: int) -> None:
        """Refuse what is far too long at the cost of what would fit, in time and memory.

        Cutting a text into pieces adds a few tokens at each cut, but never doubles them.
        """
        if len(text) <= _PIECE_CHARS:
            return
        tokens = 0
        for start in range(0, len(text), _PIECE_CHARS):
            tokens += len(self._ids(text[start : start + _PIECE_CHARS], False))
            if tokens > 2 * context:
                raise ContextExceeded(
                    f"the prompt has {len(text)} characters, and its first {start + _PIECE_CHARS} alone fill "
                    f"the context of {context} tokens; shorten the prompt or deploy with a larger --context",
                    prompt_tokens=tokens,
                    context=context,
                )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        with panics_as_errors(self._where):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def detokeniser(self) -> Detokeniser:
        return Detokeniser(self.decode, self.special_ids)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for within a text; empty for an id without a token."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            alphabet = _byte_alphabet()
            if all(c in alphabet for c in piece):
                return bytes(alphabet[c] for c in piece)
            return str(piece).encode()
        if match := _BYTE_TOKEN.match(piece):
            return bytes([int(match[1], 16)])
        return str(piece).replace("\u2581", " ").encode()


def load_text_model(store: TextStore, digest: str) -> TextModel | None:
    """The text half of a model in the store, or None when the store lacks it. Blocks; call it in a thread.

    Raises `UnsupportedModel` for a model without a tokenizer, `ModelCorrupt` for one that cannot be read.
    """
    manifest = store.get(digest)
    if manifest is None:
        return None
    if not manifest.tokenizer:
        raise UnsupportedModel(
            f"model {digest[:12]} has no tokenizer.json; convert its tokenizer (transformers: "
            "save_pretrained) and deploy again"
        )
    if not store.holds(manifest.tokenizer):
        return None
    parts: list[bytes] = []
    size = 0
    for part in store.read(manifest.tokenizer):
        size += len(part)
        if size > _MAX_TOKENIZER_BYTES:
            raise ModelCorrupt(
                f"tokenizer.json of manifest {digest[:12]} is larger than {_MAX_TOKENIZER_BYTES} bytes"
            )
        parts.append(part)
    return TextModel(manifest, b"".join(parts))
