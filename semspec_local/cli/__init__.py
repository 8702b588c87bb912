"""The command line: parse, call the library, print. Errors of the library become one line and an exit code here."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import click

from ..errors import SemspecError

SOME_FAILED, INTERRUPTED = 3, 130

EPILOG = """\b
Exit codes: 0 ok; 1 failed while running; 2 usage or configuration; 3 finished, but some items failed;
4 a model or probe that cannot be used; 130 interrupted (what was written is kept)."""


class _Group(click.Group):
    """Loads a command's module when it is asked for, so that `--help` is quick."""

    modules: ClassVar[dict[str, str]] = {
        name: name for name in ("run", "batch", "bench", "costs", "doctor", "models", "probe", "policies")
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        from importlib import import_module

        module = import_module(f"{__name__}.{self.modules[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    cls=_Group,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SEMSPEC", "max_content_width": 100},
)
@click.version_option(package_name="semspec-local", prog_name="semspec-local")
def cli() -> None:
    """Let a small model write for a big one, step by step, offline, on ordinary hardware.

    Two models of the same kind work together. The DRAFT is small and fast: it writes the next STEP of the
    reasoning, up to a blank line. The TARGET is big and good: it reads that step in one pass, which is quicker
    than writing it. Two small PROBES look into both models and estimate how likely a step with that meaning is.
    A step that passes stays; for one that does not, the target writes its own.

    The method is lossy: the text is not what the target alone would have written, and answers can be wrong
    where the target's would be right. `--policy never` runs the target alone.

    \b
    semspec-local models pull qwen2.5-coder     get the default pair (once)
    semspec-local run "How many ...?"           ask a question
    """


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: run, and exit with the right code."""
    sys.exit(_run(argv))


def _run(argv: Sequence[str] | None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for the life of the process
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a stream that somebody replaced
            stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        result = cli.main(args=list(argv) if argv is not None else None, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SemspecError as error:
        click.echo(f"Error: {error}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except OSError as error:
        if error.errno != errno.EPIPE:
            click.echo(f"Error: {error}", err=True)
            return 1
        # The reader has gone, as with `| head`: end quietly, also when Python flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
