"""What a run looks like on a terminal."""

from __future__ import annotations

import click

from semspec_local.cli import show
from semspec_local.trace import StepRecord


def record(text: str, **changes) -> StepRecord:
    facts = {"index": 0, "step_index": 0, "origin": "draft", "committed": True, "reason": "ratio_ok", "end": "eos"}
    return StepRecord(**{**facts, "text": text, **changes})


def test_text_of_a_model_cannot_command_a_terminal():
    shown = show.styled(record("a\x1b[2Jb\x07\tc\n\x9b"), plain=False)
    assert click.unstyle(shown) == "a\ufffd[2Jb\ufffd\tc\n\ufffd"


def test_text_that_goes_to_a_file_is_left_as_it_is():
    assert show.styled(record("a\x1b[2J"), plain=True) == "a\x1b[2J"


def test_colours_tell_who_wrote_a_step():
    colours = {
        show.styled(record("x", origin=origin, reason=reason), plain=False)
        for origin, reason in (("target", "priming"), ("draft", "ratio_ok"), ("target", "rejected"))
    }
    assert len(colours) == 3


def test_a_rejected_step_says_why():
    rejected = record("bad\nstep", committed=False, reason="below_floor", score=0.25, threshold=0.7)
    assert click.unstyle(show.rejected(rejected)) == (
        "  | rejected (below_floor, score 0.25 threshold 0.7):\n  | bad\n  | step\n"
    )
    assert "wanted to stop" in show.rejected(record("", committed=False, reason="forced_target"))
