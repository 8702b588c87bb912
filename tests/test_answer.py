"""The final answer in a text, without a model and without mathematics."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.answer import after_hashes, closing_boxes, final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{7}.", "7"),
        (r"\boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\fbox{x}", "x"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\text{it is }\boxed{3}}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\\boxed{7}", "7"),
        (r"} \boxed{7} {", "7"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{ 7 } is what I put within \boxed{}.", "7"),
        (r"\boxed{}", None),
        (r"\boxed{\boxed{}}", None),
        (r"\boxed\{7\}", None),
        (r"\boxed7", None),
        ("boxed{7}", None),
        ("", None),
    ],
)
def test_the_last_box_that_holds_anything(text, answer):
    assert last_boxed(text) == answer
    assert final_answer(text) == (text.strip() if answer is None else answer)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r"$x = \boxed{2}$ or $x = \boxed{-3}$.", ["2", "-3"]),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}", ["1", "2", "3"]),
        (r"\boxed{4}\text{ and }\boxed{5}", ["4", "5"]),
        (r"\boxed{4}, \boxed{4}", ["4"]),
        (r"\boxed{1} is wrong, and so it is \boxed{2}", ["2"]),
        (r"\boxed{1}. \boxed{2}", ["2"]),
        ("\\boxed{1},\n\n\\boxed{2}", ["2"]),
        ("none", []),
    ],
)
def test_boxes_in_a_row_are_one_answer(text, answers):
    assert closing_boxes(text) == answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is 3.\n#### 18", "18"),
        ("#### 1,250\n", "1,250"),
        ("#### 18 apples", "18 apples"),
        ("#### -5\n\nIs there more?", "-5"),
        ("#### Step 1: add\n#### 2. sum\nIt is 18.", None),
        ("#### 12\n#### Step 2: go on\nHm", "12"),
        ("##### 18", None),
        ("####", None),
        ("18", None),
    ],
)
def test_what_follows_four_hashes_unless_it_is_a_heading(text, answer):
    assert after_hashes(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 30_000,
        "\\boxed{" * 30_000 + "}" * 30_000,
        "\\boxed{1}," * 20_000,
        "\\boxed{ }" * 20_000,
        "\\boxed" + " " * 200_000,
        "#### x\n" * 30_000,
        "{\\" * 100_000,
    ],
)
def test_reading_takes_no_longer_than_the_text(text):
    begin = time.process_time()
    for read in (last_boxed, closing_boxes, after_hashes, final_answer):
        read(text)
    assert time.process_time() - begin < 10, "what grows with the square of the length takes minutes"


@given(st.lists(st.sampled_from(["\\boxed{", "\\fbox {", "{", "}", "\\", "x", "####", "\n", " ", "and", ",", "7"])))
def test_what_is_found_stands_in_the_text(pieces):
    text = "".join(pieces)
    found = last_boxed(text)
    assert found is None or (found and found in text and found == found.strip())
    assert closing_boxes(text)[-1:] == ([] if found is None else [found])
    assert (after_hashes(text) or "") in text
