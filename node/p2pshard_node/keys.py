"""Keys for the HTTP API of this node: who may use it from other machines, and how much.

A key is shown once, when it is made; only its hash is kept. It is 256 random bits, so a plain hash keeps it as well as
a slow one would.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from p2pshard.errors import Conflict, InvalidRequest, Overloaded

from .json_files import JsonFiles, read_json

__all__ = ["PREFIX", "ApiKey", "ApiKeys"]

PREFIX = "p2psk-"
MAX_KEYS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}")
_MOST = 1_000_000


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key."""

    name: str
    sha256: str
    created: int
    """Seconds since 1970."""
    per_minute: int | None = None
    """Requests that may begin in a minute."""
    at_once: int | None = None
    """Requests that may be under way."""

    def to_json(self) -> dict[str, Any]:
        """Without the hash."""
        return {k: v for k, v in asdict(self).items() if k != "sha256"}


class _Use:
    """What a key has under way, and may begin: a bucket that a minute fills."""

    def __init__(self, now: float) -> None:
        self.under_way = 0
        self.spent, self.at = 0.0, now

    def begin(self, key: ApiKey, now: float) -> None:
        """Count one more. Raises `Overloaded`."""
        if key.at_once is not None and self.under_way >= key.at_once:
            raise Overloaded(
                f"key {key.name} has {self.under_way} requests under way, and {key.at_once} are allowed",
                retry_after_s=1.0,
            )
        if key.per_minute is not None:
            rate = key.per_minute / 60
            self.spent, self.at = max(0.0, self.spent - (now - self.at) * rate), now
            if self.spent + 1 > key.per_minute:
                raise Overloaded(
                    f"key {key.name} may begin {key.per_minute} requests a minute",
                    retry_after_s=math.ceil((self.spent + 1 - key.per_minute) / rate),
                )
            self.spent += 1
        self.under_way += 1


class ApiKeys:
    """The keys of one node, in a file that only its user can read."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock, self._files = path, clock, JsonFiles()
        self._keys: dict[str, ApiKey] = {}
        self._uses: dict[str, _Use] = {}
        try:
            for value in read_json(path) or []:
                key = ApiKey(**value)
                self._keys[key.name] = key
        except TypeError as error:
            raise Conflict(f"{path} is damaged ({error}); move it away and start again") from error

    def all(self) -> list[ApiKey]:
        """By name."""
        return [self._keys[name] for name in sorted(self._keys)]

    async def create(
        self, name: str, *, per_minute: int | None = None, at_once: int | None = None
    ) -> tuple[ApiKey, str]:
        """A new key, and its secret, which is not to be had again. Raises `InvalidRequest`, `Conflict` for a name in use."""
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "a key's name has 1 to 63 letters, digits and any of . _ @ -, a letter or digit first",
                field="name",
            )
        for field, value in (("per_minute", per_minute), ("at_once", at_once)):
            if value is not None and not 1 <= value <= _MOST:
                raise InvalidRequest(f"{field} is from 1 to {_MOST:,}", field=field)
        if name in self._keys:
            raise Conflict(f"there is a key {name!r} already; `p2pshard keys revoke {name}` ends it")
        if len(self._keys) >= MAX_KEYS:
            raise Conflict(f"there are {MAX_KEYS} keys; revoke some")
        secret = PREFIX + secrets.token_urlsafe(32)
        key = self._keys[name] = ApiKey(name, _hash(secret), int(time.time()), per_minute, at_once)
        await self._save()
        return key, secret

    async def revoke(self, name: str) -> None:
        """A key is of no use any more; what it has under way ends by itself. Raises `InvalidRequest` for a name that is none."""
        if name not in self._keys:
            known = ", ".join(sorted(self._keys)) or "none"
            raise InvalidRequest(f"there is no key {name[:80]!r}; keys are: {known}", field="name")
        del self._keys[name]
        self._uses.pop(name, None)
        await self._save()

    async def _save(self) -> None:
        self._files.put(self._path, [asdict(key) for key in self.all()])
        await self._files.saved()

    def find(self, secret: str) -> ApiKey | None:
        """The key that a secret is of."""
        given = _hash(secret)
        return next((k for k in self._keys.values() if secrets.compare_digest(k.sha256, given)), None)

    @contextmanager
    def use(self, key: ApiKey) -> Iterator[None]:
        """While a request is under way. Raises `Overloaded` with when to come again."""
        now = self._clock()
        use = self._uses.setdefault(key.name, _Use(now))
        use.begin(key, now)
        try:
            yield
        finally:
            use.under_way -= 1


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
