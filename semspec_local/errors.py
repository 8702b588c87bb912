"""Every error this package raises on purpose.

SemspecError                    exit code 1: something failed while running
|-- ConfigError                 2: an option, a question or a file name that cannot be used
|   `-- PairNotPulledError      2: a known pair whose files are not on this machine yet
|-- IncompatibleError           4: files that cannot work, or cannot work together
|   |-- ModelError              4: a GGUF that is missing, broken, or of a kind we cannot drive
|   `-- ProbeError              4: a probe that is missing, broken, or made for another model
|-- DownloadError               1: a file could not be had, or is not the file its manifest names
`-- DecodeError                 1: llama.cpp could not evaluate tokens

Interruption is not an error of ours: it stays `KeyboardInterrupt` (exit code 130).
Messages say what was given, what was wanted, and what to do.
"""

from __future__ import annotations

NOT_AS_WRITTEN = (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError)
"""What reading JSON of another shape than expected may raise: missing keys, other types, endless nesting, infinity."""


def one_line(text: str) -> str:
    """A stranger's text for a message: on one line; characters that could command a terminal become blanks."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


class SemspecError(Exception):
    """Root of all errors raised on purpose; `exit_code` is what the command line returns for it."""

    exit_code: int = 1


class ConfigError(SemspecError):
    """An option, a question or a file name cannot be used as given."""

    exit_code = 2


class PairNotPulledError(ConfigError):
    """A pair is known, but its files are not on this machine yet."""


class IncompatibleError(SemspecError):
    """Files that cannot work here, or cannot work together."""

    exit_code = 4


class ModelError(IncompatibleError):
    """A GGUF is missing, broken, or of a kind that cannot be driven."""


class ProbeError(IncompatibleError):
    """A probe is missing, broken, or made for another model."""


class DownloadError(SemspecError):
    """A file could not be fetched, or is not the file that its manifest names."""


class DecodeError(SemspecError):
    """llama.cpp could not evaluate the tokens it was given."""
