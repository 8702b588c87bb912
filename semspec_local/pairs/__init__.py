"""Pairs of models: manifests in, files on disk out.

manifest.py   TOML to dataclasses, strictly
places.py     the folder of a pair, the offline switch
store.py      which pairs there are, which are on this machine: list, resolve, verify
transfer.py   pull: fetch, check, requantize
state.py      what was made here, in each pair's state.json
wheels.py web.py hub.py   the three kinds of download
files.py progress.py      hashing, locking, finishing; bars and lines
"""

from .manifest import PairManifest
from .progress import progress_on
from .store import (
    PairFiles,
    Verified,
    default_pair,
    is_embedded,
    list_pairs,
    load_manifest,
    resolve,
    usual_pair,
    verify,
)
from .transfer import pull

__all__ = [
    "PairFiles",
    "PairManifest",
    "Verified",
    "default_pair",
    "is_embedded",
    "list_pairs",
    "load_manifest",
    "progress_on",
    "pull",
    "resolve",
    "usual_pair",
    "verify",
]
