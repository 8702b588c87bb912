"""Following a long count: plain lines where there is no terminal."""

from __future__ import annotations

import io

from semspec_local.cli.counting import counting


def test_lines_come_now_and_then_and_at_the_end():
    stream, now = io.StringIO(), [0.0]
    with counting("items", 10, done=2, stream=stream, clock=lambda: now[0]) as advance:
        for done, at in ((3, 1.0), (4, 10.0), (5, 12.0), (6, 400.0), (10, 401.0)):
            now[0] = at
            advance(done, "all well" if done == 6 else "")
    assert stream.getvalue().splitlines() == [
        "4 of 10 items, about 30 s left",
        "6 of 10 items, about 7 min left, all well",
        "10 of 10 items",
    ]


def test_a_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with counting("items", 4, stream=stream) as advance:
        advance(2, "fast")
        advance(4, "")
    assert "4/4" in stream.getvalue()
