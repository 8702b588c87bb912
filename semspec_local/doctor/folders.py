"""The user's folders, and whether the network may be used."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..errors import ConfigError, SemspecError
from ..pairs import default_pair, load_manifest
from ..pairs.files import format_size
from ..pairs.places import is_offline, pair_folder
from ..pairs.store import download_bytes, pull_command
from ..resources import cache_dir
from ..roles import ROLES
from .check import Verdict, fail, ok, warn
from .examination import Examination

_SWITCHES = ("SEMSPEC_OFFLINE", "HF_HUB_OFFLINE")
_READ_AS_OFF = ("", "0", "off", "no", "false")
_UNFINISHED = (".part", ".parts", ".part-hub", ".tmp", ".incomplete", ".downloadInProgress")


def cache(examination: Examination) -> Verdict:
    """The folder of pulled models can be written, has room, and holds nothing that was left half done."""
    folder = cache_dir()
    variable = next((name for name in ("SEMSPEC_CACHE", "XDG_CACHE_HOME") if os.environ.get(name)), None)
    said = f"{folder} ({f'by {variable}' if variable else 'the usual place'})"
    if trouble := _cannot_write(folder):
        return fail(f"{said}: {trouble}", "set SEMSPEC_CACHE to a folder that can be written")
    free = shutil.disk_usage(_nearest(folder)).free
    said += f", {format_size(free)} free"
    name, needed = _to_download(examination)
    if needed > free:
        fix = "make room, or set SEMSPEC_CACHE to a folder on another disk"
        return warn(f"{said}; {name} still needs {format_size(needed)}", fix)
    if left := _unfinished(folder):
        owner = left[0].relative_to(folder / "models").parts[0]
        rest = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return warn(
            f"{said}; unfinished: {left[0].name}{rest}", f"go on with {pull_command(owner)}, or delete what is left"
        )
    return ok(said)


def _cannot_write(folder: Path) -> str | None:
    """Why nothing can be written there, None where it can; nothing is left behind."""
    try:
        nearest = _nearest(folder)
        if not nearest.is_dir():
            return f"{nearest} is no folder"
        if nearest != folder:  # it will be made when it is wanted
            return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} may not be written"
        list(folder.iterdir())
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"it cannot be read and written ({error.strerror or error})"


def _nearest(folder: Path) -> Path:
    """The folder itself, or what exists of the way to it; a dangling link exists."""
    return next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)


def _to_download(examination: Examination) -> tuple[str, int]:
    """The pair that would be used were it here, and how many bytes of it are not."""
    name = examination.pair or default_pair()
    if examination.target is not None:
        return name, 0
    try:
        manifest = load_manifest(name)
    except ConfigError:  # said by another check
        return name, 0
    folder = pair_folder(manifest.name)
    try:
        here = examination.sources is not None and examination.sources.pair == manifest.name
        return name, 0 if here else sum(download_bytes(manifest.role(role), folder) for role in ROLES)
    except (OSError, SemspecError):
        return name, 0


def _unfinished(folder: Path) -> list[Path]:
    """What interrupted pulls have left."""
    return sorted(path for path in folder.glob("models/*/*") if path.name.endswith(_UNFINISHED))


def offline(examination: Examination) -> Verdict:
    """Whether the network may be used, and that nothing here did."""
    values = {name: os.environ[name] for name in _SWITCHES if name in os.environ}
    if opened := examination.opened:
        return fail(f"loading libraries and models used the network: {', '.join(opened)}", "report this")
    for name, value in values.items():
        if not is_offline() and value.strip().lower() not in _READ_AS_OFF:
            return warn(f"{name} is {value!a}, which is not read as a switch", f"set {name}=1, or unset it")
    what = f"the network is off ({', '.join(values)})" if is_offline() else "only models pull uses the network"
    return ok(f"{what}; nothing that was looked at here did")
