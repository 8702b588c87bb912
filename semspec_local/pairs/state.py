"""What was made on this machine: `state.json` in a pair's folder.

`use` names the file of each role; `files` says of each file what it was made from and its sha256. A file that is
not recorded here was not finished.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..roles import ROLES, Role
from .files import write_json
from .manifest import LocalFile, ModelFile

STATE_FILE = "state.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One finished file: `source_sha256` is the original's, `sha256` and `size` (bytes) are this file's own.

    `requantized` is the llama.cpp file type it was turned into, None for an original; `llama_cpp_python` is the version
    that did it; `date` is UTC, ISO 8601.
    """

    file: str
    source_sha256: str
    size: int
    sha256: str
    requantized: str | None
    llama_cpp_python: str | None
    date: str


@dataclass
class PairState:
    """The state of one pair's folder."""

    use: dict[Role, str] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def in_use(self, role: Role, model_file: ModelFile) -> FileRecord | None:
        """The record of the role's file, None when there is none or it was made from another original."""
        record = self.files.get(self.use.get(role, ""))
        return record if record is not None and _still_fits(record, model_file) else None


def read_state(folder: Path) -> PairState:
    """Read the state of a pair's folder; an absent file is an empty state, a broken one a ConfigError."""
    path = folder / STATE_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return PairState()
    except (OSError, ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from None
    if not isinstance(data, dict) or data.get("version") != _VERSION:
        raise _broken(path, f"wanted an object of version {_VERSION}")
    use, files = data.get("use"), data.get("files")
    if not isinstance(use, dict) or not isinstance(files, dict):
        raise _broken(path, "wanted the objects `use` and `files`")
    records = {name: _record(name, value, path) for name, value in files.items()}
    return PairState(use={role: use[role] for role in ROLES if isinstance(use.get(role), str)}, files=records)


def write_state(folder: Path, state: PairState) -> None:
    """Write the state of a pair's folder, atomically."""
    records = {name: asdict(record) for name, record in state.files.items()}
    write_json(folder / STATE_FILE, {"version": _VERSION, "use": state.use, "files": records})


def _still_fits(record: FileRecord, model_file: ModelFile) -> bool:
    """False when the manifest has come to name another original, or another place of a local one."""
    source = model_file.source
    if isinstance(source, LocalFile) and record.requantized is None and record.file != str(source.path):
        return False
    return model_file.sha256 in (None, record.source_sha256)


def _record(name: str, value: Any, path: Path) -> FileRecord:
    wanted = {item.name for item in fields(FileRecord)}
    if not isinstance(value, dict) or set(value) != wanted or value["file"] != name:
        raise _broken(path, f"the record of {name!r} has other keys than {', '.join(sorted(wanted))}")
    for key in wanted:
        kinds = int if key == "size" else (str, type(None)) if key in ("requantized", "llama_cpp_python") else str
        if not isinstance(value[key], kinds):
            raise _broken(path, f"{key} of {name!r} is {value[key]!r:.80}")
    return FileRecord(**value)


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} is broken ({why}); delete it and run `semspec-local models pull` again")
