"""A file of a Hugging Face repository, through huggingface_hub (the optional extra `hub`)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError, DownloadError
from .files import Advance, file_bytes
from .manifest import HubFile
from .progress import Watch
from .web import Note


def fetch_hub_file(source: HubFile, temporary: Path, advance: Advance, note: Note) -> None:
    """Fetch the file into `temporary`. ConfigError without the extra; DownloadError with the hub's first line.

    huggingface_hub takes a copy from its own cache when it has one; after an interruption it may start over.
    """
    hub = _import_hub(offline=False)
    scratch = temporary.with_name(temporary.name + "-hub")
    note(f"huggingface_hub fetches {source.file} of {source.repo}; if interrupted, it may start this file over")
    try:
        with Watch(scratch, advance) as watch:
            found = Path(
                hub.hf_hub_download(
                    repo_id=source.repo, filename=source.file, revision=source.revision, local_dir=scratch
                )
            )
        found.replace(temporary)
        advance(file_bytes(temporary) - watch.told)
    except Exception as error:  # the hub's errors differ from version to version; each means: no file
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DownloadError(f"{source.repo}/{source.file} could not be had: {first_line}") from error
    shutil.rmtree(scratch, ignore_errors=True)


def copy_cached_hub_file(source: HubFile, temporary: Path) -> bool:
    """Copy the file out of huggingface_hub's own cache, without network; False when it is not there."""
    try:
        hub = _import_hub(offline=True)
    except ConfigError:
        return False
    found = hub.try_to_load_from_cache(repo_id=source.repo, filename=source.file, revision=source.revision)
    if not isinstance(found, str):
        return False
    shutil.copyfile(found, temporary)
    return True


def _import_hub(*, offline: bool) -> ModuleType:
    # huggingface_hub reads these once, when it is imported.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise ConfigError(
            "this pair comes from Hugging Face and needs the extra `hub`; install it with: "
            'pip install "semspec-local[hub]"'
        ) from None
    module: ModuleType = huggingface_hub
    return module
