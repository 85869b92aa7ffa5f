"""Reading a tokenizer.json that nobody vouches for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer

from p2pshard.errors import ModelCorrupt

__all__ = ["load_tokenizer", "panics_as_errors"]

_MAX_BYTES = 256 * 2**20

# Only the library's batch calls let other Python threads run meanwhile, so those are used, with batches of
# one: a pool of threads for each of them would do nothing, and warn at every later fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def load_tokenizer(data: bytes, where: str) -> Tokenizer:
    """The tokenizer that ``data`` describes. Raises `ModelCorrupt`, naming ``where``, for anything else.

    The library panics on some inputs (a merge whose result is not in the vocabulary), which reaches Python as
    an exception outside of `Exception` and would end a daemon's task without a word.
    """
    if len(data) > _MAX_BYTES:
        raise ModelCorrupt(f"{where}: {len(data)} bytes; a tokenizer has up to {_MAX_BYTES}")
    with panics_as_errors(where):
        try:
            return Tokenizer.from_buffer(data)
        except Exception as error:  # nothing more precise is raised
            raise ModelCorrupt(f"{where}: not a tokenizer: {error}") from error


@contextmanager
def panics_as_errors(where: str) -> Iterator[None]:
    """Around any call of a tokenizer: a panic becomes `ModelCorrupt`."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ModelCorrupt(f"{where}: not a tokenizer that can be used: {error}") from error
