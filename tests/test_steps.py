"""Where a step ends, for every way of cutting the same text into tokens."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semspec_local.steps import StepEnd, StepReader, carry_for, split_steps

ASTRONAUT = "👩‍🚀"
TEXT = st.text(st.sampled_from(["\n", "\r", " ", "a", "b", "<", ">", "歪", "🚀", "\u200d"]), max_size=40)
CUTS = st.lists(st.integers(0, 200), max_size=40)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes as tokens that end at these places."""
    places = sorted({place for place in cuts if 0 < place < len(data)})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)]) if a < b]


def read(reader: StepReader, pieces: list[bytes]) -> StepEnd:
    for piece in pieces:
        if reader.feed(piece):
            break
    return reader.end or reader.finish()


def run_text(pieces: list[bytes], stops: list[str], max_tokens: int = 1000) -> str:
    """The text of a whole run, step after step, as an engine would commit it."""
    text, at = b"", 0
    while at < len(pieces):
        reader = StepReader(max_tokens=max_tokens, stops=stops, carry=carry_for(stops, None, text))
        end = read(reader, pieces[at:])
        text = text + reader.data[: end.n_bytes] if end.n_bytes >= 0 else text[: end.n_bytes]
        if end.kind == "stop":
            break
        # a capped step is cut back, and what was cut off is written again
        at += (end.kind == "length" and reader.n_complete_tokens) or reader.n_tokens
    return text.decode()


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def first_boundary_end(data: bytes) -> int | None:
    """The rule, said plainly: the first boundary with content before it."""
    for at in range(len(data) + 1):
        for mark in (b"\n\n", b"\r\n\r\n"):
            if data[:at].endswith(mark) and data[: at - len(mark)].strip():
                return at
    return None


@settings(max_examples=200)
@given(TEXT, CUTS)
def test_a_step_ends_with_the_token_that_completes_the_first_boundary(text: str, cuts: list[int]) -> None:
    pieces = cut(text.encode(), cuts)
    end = read(StepReader(max_tokens=1000), pieces)
    place = first_boundary_end(text.encode())
    if place is None:
        assert end == StepEnd("eos", len(text.encode()))
    else:
        token_ends = accumulate(len(piece) for piece in pieces)
        # the first token end that is past the boundary and breaks no character
        assert end == StepEnd("boundary", next(a for a in token_ends if a >= place and is_text(text.encode()[:a])))


@pytest.mark.case(29)
@settings(max_examples=200)
@given(TEXT, CUTS)
def test_text_never_holds_a_broken_character(text: str, cuts: list[int]) -> None:
    reader = StepReader(max_tokens=1000)
    for piece in cut(text.encode(), cuts):
        end = reader.feed(piece)
        assert text.startswith(reader.text)
        if end:
            assert reader.text.encode() == reader.data
            break


@settings(max_examples=200)
@given(TEXT, CUTS, st.integers(1, 8))
def test_a_capped_step_is_cut_back_to_whole_characters(text: str, cuts: list[int], max_tokens: int) -> None:
    pieces = cut(text.encode(), cuts)
    reader = StepReader(max_tokens=max_tokens)
    end = read(reader, pieces)
    assert reader.n_tokens <= max_tokens
    kept = b"".join(pieces[: reader.n_complete_tokens])
    assert is_text(kept)
    if end.kind == "length":
        assert reader.n_tokens == max_tokens
        assert reader.data[: end.n_bytes] == (kept if reader.n_complete_tokens else reader.data)


@settings(max_examples=300)
@given(TEXT, CUTS, CUTS, st.lists(st.sampled_from(["\n\na", "ab", "b", "歪", "a\n", "aba"]), max_size=3))
def test_a_stop_string_cuts_the_same_text_however_tokens_and_steps_fall(
    text: str, cuts: list[int], other_cuts: list[int], stops: list[str]
) -> None:
    first_ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    wanted = text
    if first_ends:
        wanted = text[: min(first_ends) - max(len(s) for s in stops if text[: min(first_ends)].endswith(s))]
    assert run_text(cut(text.encode(), cuts), stops) == wanted
    assert run_text(cut(text.encode(), other_cuts), stops, max_tokens=4) == wanted


@settings(max_examples=200)
@given(st.text(max_size=60) | TEXT)
def test_split_steps_is_lossless_and_only_the_last_step_may_lack_a_boundary(text: str) -> None:
    steps = split_steps(text)
    assert "".join(steps) == text
    for step in steps[:-1]:
        assert step.endswith(("\n\n", "\r\n\r\n")) and step.encode().strip()
        assert first_boundary_end(step.encode()) == len(step.encode())
    assert not steps or steps[-1]


def test_split_steps_agrees_with_a_reader_fed_one_character_at_a_time() -> None:
    text = "\n\nFirst: 歪.\n\n\nSecond\r\n\r\n third \n \n still third\n\n"
    assert split_steps(text) == ["\n\nFirst: 歪.\n\n", "\nSecond\r\n\r\n", " third \n \n still third\n\n"]
    by_character, reader = [], StepReader(max_tokens=1000)
    for character in text:
        if reader.feed(character.encode()):
            by_character.append(reader.text)
            reader = StepReader(max_tokens=1000)
    assert by_character == split_steps(text)
    assert split_steps("") == []
    assert split_steps("a;b;;c", boundary=";") == ["a;", "b;", ";c"]
    assert split_steps("half a pair \udcff\n\nnext") == ["half a pair \udcff\n\n", "next"]


def test_leading_blank_lines_never_end_a_step() -> None:
    reader = StepReader(max_tokens=100)
    assert [reader.feed(piece) for piece in (b"\n\n", b"\n", b" \t\n\n", b"So")] == [None] * 4
    assert reader.feed(b".\n\n\n") == StepEnd("boundary", 13)
    assert reader.text == "\n\n\n \t\n\nSo.\n\n\n"


def test_bytes_after_the_boundary_in_its_token_stay_in_the_step() -> None:
    reader = StepReader(max_tokens=100)
    assert reader.feed(b"one\n") is None
    assert reader.feed(b"\ntwo") == StepEnd("boundary", 8)
    assert reader.text == "one\n\ntwo"


def test_a_boundary_waits_for_the_end_of_a_character() -> None:
    raw = "歪".encode()
    reader = StepReader(max_tokens=100)
    assert reader.feed(b"one\n\n" + raw[:1]) is None
    assert reader.text == "one\n\n"
    assert reader.feed(raw[1:]) == StepEnd("boundary", 8)
    assert reader.text == "one\n\n歪"


@pytest.mark.case(29)
def test_an_emoji_split_over_tokens_comes_out_whole() -> None:
    reader = StepReader(max_tokens=100)
    seen = []
    for byte in ASTRONAUT.encode():
        reader.feed(bytes([byte]))
        seen.append(reader.text)
    assert all(ASTRONAUT.startswith(text) and "\ufffd" not in text for text in seen)
    assert reader.text == ASTRONAUT


def test_a_length_cap_inside_the_only_character_keeps_everything() -> None:
    reader = StepReader(max_tokens=2)
    raw = "🚀".encode()
    assert reader.feed(raw[:1]) is None
    assert reader.feed(raw[1:2]) == StepEnd("length", 2)
    assert reader.n_complete_tokens == 0


def test_a_stop_string_that_began_in_earlier_text_gives_a_negative_length() -> None:
    stops = ["\n\nQ:"]
    reader = StepReader(max_tokens=100, stops=stops, carry=carry_for(stops, None, b"answer\n\n"))
    assert reader.feed(b"Q: next") == StepEnd("stop", -2)
    assert reader.text == ""
    assert reader.data == b"Q: next"


def test_a_stop_string_wins_over_everything_else_in_its_token() -> None:
    reader = StepReader(max_tokens=1, stops=["STOP"], close_tag="</think>")
    assert reader.feed(b"a\n\n</think>b STOP c") == StepEnd("stop", 13)
    assert reader.text == "a\n\n</think>b "


def test_what_lies_wholly_in_the_carry_ends_nothing() -> None:
    reader = StepReader(max_tokens=100, stops=["b"], close_tag="<c>", carry=b"ab<c>")
    assert reader.feed(b"x") is None
    assert reader.feed(b"\n\n") == StepEnd("boundary", 3)


def test_the_close_tag_ends_the_step_and_may_span_steps() -> None:
    carry = carry_for((), "</think>", "歪 done </thi".encode())
    reader = StepReader(max_tokens=100, close_tag="</think>", carry=carry)
    assert reader.feed(b"nk") is None
    assert reader.feed(b">\n\n") == StepEnd("close", 5)


def test_carry_is_one_byte_shorter_than_the_longest_mark() -> None:
    assert carry_for((), None, b"abc") == b""
    assert carry_for(("x",), None, b"abc") == b""
    assert carry_for(("xy", "歪"), None, b"abc") == b"bc"
    assert carry_for(("xy",), "</think>", b"abc") == b"abc"


def test_a_control_token_counts_and_adds_nothing() -> None:
    reader = StepReader(max_tokens=2)
    assert reader.feed(b"") is None
    assert reader.feed(b"a") == StepEnd("length", 1)
    assert (reader.n_tokens, reader.n_complete_tokens) == (2, 2)


def test_an_ended_step_takes_no_more() -> None:
    reader = StepReader(max_tokens=9)
    assert reader.finish() == StepEnd("eos", 0) == reader.end
    with pytest.raises(RuntimeError):
        reader.feed(b"a")
    with pytest.raises(RuntimeError):
        reader.finish()


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"boundary": ""}, {"stops": ("a", "")}, {"close_tag": ""}])
def test_a_rule_that_would_always_or_never_match_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        StepReader(**{"max_tokens": 1, **wrong})  # type: ignore[arg-type]
