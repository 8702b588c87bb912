"""The lines of a job: what is an item, and what every other line becomes."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semspec_local.errors import ConfigError
from semspec_local.jobs import BadLine, Item, read_job
from semspec_local.jobs.items import MAX_LINE_BYTES, digest_of, entry_of


def entry(value) -> Item | BadLine:
    found = entry_of((value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "surrogatepass"), 7)
    assert found is not None
    return found


def user(text: str):
    return ({"role": "user", "content": text},)


def test_three_kinds_of_lines_are_items():
    assert entry({"prompt": "Why?"}) == Item("line-7", 7, user("Why?"))
    assert entry({"id": 5, "messages": [{"role": "user", "content": "Why?"}]}) == Item("5", 7, user("Why?"))
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]}],
        "max_completion_tokens": 9,
        "seed": 3,
        "stop": "x",
        "temperature": 0,
        "top_p": None,
        "chat_template_kwargs": {"enable_thinking": False},
        "frequency_penalty": 0.0,
        "user": "somebody",
    }
    batch = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    options = {"template_kwargs": {"enable_thinking": False}, "temperature": 0}
    assert entry(batch) == Item("c", 7, user("Why?"), {"max_tokens": 9, "seed": 3, "stop": ("x",), **options})


def test_a_limit_that_is_null_is_none():
    body = {"messages": [{"role": "user", "content": "Why?"}], "max_completion_tokens": None, "max_tokens": 64}
    found = entry({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert isinstance(found, Item) and found.overrides == {"max_tokens": 64}


def test_settings_of_a_line_are_taken_over():
    own = {"policy": "never", "threshold": 0.5, "seed": 0, "max_tokens": 5, "draft": False, "stop": ["a", "b"]}
    found = entry({"prompt": "Why?", "semspec": own})
    assert isinstance(found, Item) and found.overrides == {**own, "stop": ("a", "b")}


@pytest.mark.case(38)
@pytest.mark.case(41)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "got a list; wanted a JSON object"),
        ("null", "got missing; wanted a JSON object"),
        ("5", "got a number"),
        ('"text"', "got a text"),
        ("{", "this is no JSON"),
        ("[" * 100_000, "this is no JSON"),
        ({}, "prompt is missing; wanted a text"),
        ({"prompt": 5}, "prompt is a number; wanted a text"),
        ({"prompt": "  "}, "prompt is empty"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": "a", "messages": []}, "got both prompt and messages"),
        ({"messages": []}, "wanted a list of messages"),
        ({"messages": [5]}, "has no role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content is a number"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are no text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "wanted one of the user"),
        ({"custom_id": "a"}, "body is missing"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "method": "GET"}, "wanted POST"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "url": "/v1/embeddings"}, "url is '/v1/embeddings'"),
        ({"custom_id": "a", "params": {"prompt": "a"}}, "body is missing; wanted an object"),
        ({"custom_id": "a", "body": {"prompt": "a", "n": 2}}, "asks for n, which cannot be done here"),
        ({"custom_id": "a", "body": {"prompt": "a", "stream": True}}, "asks for stream, which cannot be done here"),
        ({"custom_id": "a", "body": {"prompt": "a", "presence_penalty": 0.5}}, "asks for presence_penalty"),
        ({"custom_id": "a", "body": {"prompt": "a", "response_format": {}}}, "asks for response_format"),
        ({"custom_id": "a", "body": {"prompt": "a", "chat_template_kwargs": 5}}, "template_kwargs is a number"),
        ({"prompt": "a", "max_tokens": 5}, 'max_tokens has no effect there; wanted it inside "semspec"'),
        ({"prompt": "a", "semspec": 5}, "semspec is a number"),
        ({"prompt": "a", "semspec": {"colour": 1}}, "no setting colour; it knows policy"),
        ({"prompt": "a", "semspec": {"max_tokens": True}}, "max_tokens is true or false; wanted int"),
        ({"prompt": "a", "semspec": {"stop": [""]}}, "stop holds something else than texts"),
        ({"prompt": "a", "id": []}, "the id is a list"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
    ],
)
def test_every_other_line_is_an_error_that_says_what_was_wanted(line, message):
    found = entry(line)
    assert isinstance(found, BadLine) and message in found.message
    assert found.line == 7


def test_a_bad_line_keeps_the_id_that_it_names():
    assert entry({"custom_id": "mine"}).id == "mine"
    assert entry({"id": 5, "prompt": ""}).id == "5"
    assert entry({"id": {}, "prompt": "a"}).id == "line-7"


@pytest.mark.case(38)
def test_files_as_they_come(tmp_path):
    path = tmp_path / "in.jsonl"
    long = b'{"prompt": "' + b"x" * (5 * 2**20) + b'"}'
    lines = [
        b'\xef\xbb\xbf{"prompt": "with a byte order mark"}\r',
        b"",
        b'{"prompt": "\xff"}',
        long,
        b"   ",
        b'{"id": "last", "prompt": "no end of line"}',
    ]
    path.write_bytes(b"\n".join(lines))
    job = read_job(path)
    assert [type(found) for found in job.entries] == [Item, BadLine, BadLine, BadLine, BadLine, Item]
    assert [found.line for found in job.entries] == [1, 2, 3, 4, 5, 6]
    blank, no_text, too_long, blank_too = (found.message for found in job.entries[1:-1])
    assert blank == blank_too == "the line is blank; wanted one JSON object a line"
    assert "byte 13 is no UTF-8" in no_text
    assert f"more than {MAX_LINE_BYTES:,} bytes" in too_long
    assert job.sha256 == digest_of(path)
    path.write_bytes(b'{"prompt": "other"}')
    assert job.sha256 != digest_of(path)


@pytest.mark.case(41)
def test_ids_that_occur_twice_are_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    with pytest.raises(ConfigError, match="the id 'a' is on line 1 and line 3"):
        read_job(path)


def test_a_folder_is_all_its_files(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text(f'{{"prompt": "{name}"}}\n')
    assert [found.id for found in read_job(tmp_path).entries] == ["a.jsonl:1", "b.jsonl:1"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no \.jsonl files"):
        read_job(tmp_path / "empty")


def test_csv_has_a_named_column(tmp_path):
    path = tmp_path / "in.csv"
    path.write_bytes('\ufeffid,question,text\r\n1,"Why,\r\nnow?",x\r\n2,,y\r\n'.encode())
    job = read_job(path)
    assert job.entries[0] == Item("1", 3, user("Why,\r\nnow?"))
    assert isinstance(job.entries[1], BadLine) and job.entries[1].id == "2"
    assert [found.id for found in read_job(path, column="text").entries] == ["1", "2"]
    with pytest.raises(ConfigError, match="has the columns id, question, text; name the one to ask with --column"):
        read_job(path, column="prompt")


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "Why?"}\n')))
    assert read_job("-").entries == (Item("line-1", 1, user("Why?")),)
    assert digest_of("-") is None


def test_a_job_without_items_is_refused(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no items"):
        read_job(path)
    with pytest.raises(ConfigError, match="no input at"):
        read_job(tmp_path / "other.jsonl")


@given(st.binary(max_size=300))
def test_any_line_is_an_item_or_an_error(line):
    found = entry_of(line.replace(b"\n", b""), 3)
    assert isinstance(found, (Item, BadLine)) and found.line == 3 and found.id


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)
FIELDS = st.sampled_from(["id", "custom_id", "prompt", "messages", "body", "semspec", "method", "url"])


@given(st.dictionaries(FIELDS, JSON | st.dictionaries(FIELDS, JSON, max_size=3), max_size=5))
def test_any_object_is_an_item_or_an_error(value):
    found = entry_of(json.dumps(value).encode(), 3)
    assert isinstance(found, (Item, BadLine))
    if isinstance(found, Item):
        assert found.messages[-1]["content"].strip()
        found.messages[-1]["content"].encode()
