"""A file behind a URL, continued with HTTP Range after an interruption. Proxies come from the environment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ..errors import DownloadError
from .files import CHUNK_BYTES, Advance, file_bytes, format_size, write_json

TIMEOUT_S = 30.0
RETRY_AFTER_S = 1.0

Note = Callable[[str], None]


class _StartOver(Exception):
    """What is there cannot be continued; says why."""


def notes_path(temporary: Path) -> Path:
    """The file beside a half file that says which version on the server it belongs to."""
    return temporary.with_name(temporary.name + ".json")


def fetch_url(url: str, temporary: Path, size: int, advance: Advance, note: Note) -> None:
    """Fetch `url` into `temporary`, continuing what is there, and again after a broken connection.

    It gives up when an attempt got no further than the one before; what is there stays for the next call. Raises
    DownloadError.
    """
    advance(file_bytes(temporary))
    while True:
        before = file_bytes(temporary)
        if before == size:
            return
        try:
            _continue(url, temporary, size, advance, note)
            return
        except _StartOver as reason:
            note(f"{reason}; starting over")
            advance(-before)
            temporary.unlink()
        except (OSError, HTTPException) as error:
            have = file_bytes(temporary)
            if have <= before or isinstance(error, HTTPError):
                raise DownloadError(
                    f"{url}: {error or type(error).__name__} (got {have} of {size} bytes); "
                    "run the same command again to continue"
                ) from None
            note(f"the connection broke at {format_size(have)} of {format_size(size)}; continuing")
            time.sleep(RETRY_AFTER_S)


def _continue(url: str, temporary: Path, size: int, advance: Advance, note: Note) -> None:
    have = file_bytes(temporary)
    if have > size:
        raise _StartOver(f"{temporary.name} is larger than the file that is wanted")
    notes = _read_notes(temporary, url)
    request = Request(url, headers={"User-Agent": "semspec-local", **_range(have, notes)})
    try:
        response = urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        error.close()
        if error.code == 416 and have:
            raise _StartOver("the server will not continue this file") from None
        raise
    with response:
        if have and response.status == 206:
            _check_continues(response, have, notes)
        elif have:
            note(
                "the server sends the file from its beginning, it does not continue or has another file; starting over"
            )
            advance(-have)
            have = 0
        _check_length(response, url, size - have)
        etag, modified = response.headers.get("ETag"), response.headers.get("Last-Modified")
        write_json(notes_path(temporary), {"url": url, "etag": etag, "last_modified": modified})
        _copy(response, temporary, have, size, advance)


def _copy(response: HTTPResponse, temporary: Path, have: int, size: int, advance: Advance) -> None:
    with temporary.open("ab" if have else "wb") as out:
        # read1 hands over what has arrived, so a broken connection loses nothing.
        while chunk := response.read1(CHUNK_BYTES):
            have += len(chunk)
            if have > size:
                raise DownloadError(f"{response.url}: the server sent more than the {size} bytes that were wanted")
            out.write(chunk)
            advance(len(chunk))
    if have < size:
        raise ConnectionError("the connection ended early")


def _range(have: int, notes: dict[str, str]) -> dict[str, str]:
    if not have:
        return {}
    etag = notes.get("etag", "")
    # A weak ETag may not stand in If-Range.
    version = etag if etag and not etag.startswith("W/") else notes.get("last_modified", "")
    return {"Range": f"bytes={have}-", **({"If-Range": version} if version else {})}


def _check_continues(response: HTTPResponse, have: int, notes: dict[str, str]) -> None:
    span = response.headers.get("Content-Range", "")
    if not span.startswith(f"bytes {have}-"):
        raise _StartOver(f"the server continues in the wrong place ({span or 'no Content-Range'})")
    for key, header in (("etag", "ETag"), ("last_modified", "Last-Modified")):
        new = response.headers.get(header)
        if new and notes.get(key, new) != new:
            raise _StartOver("the file on the server has changed")


def _check_length(response: HTTPResponse, url: str, wanted: int) -> None:
    length = response.headers.get("Content-Length")
    if length is not None and length.isdigit() and int(length) != wanted:
        raise DownloadError(f"{url}: not the file that is wanted: the server offers {length} bytes, wanted {wanted}")


def _read_notes(temporary: Path, url: str) -> dict[str, str]:
    try:
        notes = json.loads(notes_path(temporary).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(notes, dict):
        return {}
    if notes.get("url") != url and temporary.exists():
        raise _StartOver("what is there came from another address")
    return {key: value for key, value in notes.items() if isinstance(value, str)}
