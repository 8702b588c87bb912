"""The output file of a job: one line per finished item, appended and synced, and never lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..linefile import LineFile, LineFileError
from .records import failed, id_of

MANIFEST_VERSION = 1


class OutputFile(LineFile):
    """Appends lines; knows which items are finished. Use it in a `with`.

    Raises ConfigError for an output that was made otherwise or holds something else.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, force: bool = False, retry: bool = False) -> None:
        """With `retry` the items that failed leave the file."""
        self.finished: dict[str, bool] = {}  # by id: did it fail?
        self._retry = retry
        super().__init__(path, manifest, take_up=self._finished_before, kind="batch", force=force)

    def _finished_before(self, line: Mapping[str, Any]) -> bool:
        item_id = id_of(line)
        if self._retry and failed(line):
            return False
        self.finished[item_id] = failed(line)
        return True

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; it is on the disk when this returns. Raises OutputError when it cannot be."""
        try:
            super().append(line)
        except LineFileError as error:
            raise OutputError(
                f"{error}; {len(self.finished):,} finished items are safe in it, and the same command goes on when "
                "there is room"
            ) from None
        self.finished[id_of(line)] = failed(line)

    def order(self, ids: Sequence[str]) -> None:
        """Rewrite the file in this order of ids, whole or not at all."""
        places = {item_id: i for i, item_id in enumerate(ids)}
        self.rewrite(lambda line: places.get(id_of(line), len(places)))


class OutputError(LineFileError):
    """The output cannot be written any more; what is in it stays."""
