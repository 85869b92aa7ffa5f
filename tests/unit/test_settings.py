"""Settings of a deployment: strict, and named when wrong."""

from __future__ import annotations

import json

import pytest

from p2pshard.errors import InvalidRequest
from p2pshard.planning.settings import Pin, Settings


@pytest.mark.parametrize(
    "text", ["", "{}", '{"context": null, "dtype": null, "layers": null, "exclude": []}']
)
def test_nothing_asked_gives_the_defaults(text: str) -> None:
    assert Settings.from_json(text) == Settings()


def test_everything_round_trips() -> None:
    text = json.dumps(
        {
            "context": 4096,
            "concurrency": 3,
            "dtype": "int8",
            "nodes": 2,
            "layers": {"b": [12, 29], "a": [0, 11]},
            "exclude": ["z", "c", "c"],
            "wire": "q8",
        }
    )
    parsed = Settings.from_json(text)
    assert parsed == Settings(4096, 3, "int8", 2, (Pin("a", 0, 11), Pin("b", 12, 29)), ("c", "z"), "q8")
    assert Settings.from_json(parsed.to_json()) == parsed
    assert Settings.from_json(Settings().to_json()) == Settings()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[1]", "object of context"),
        ("{", "not JSON"),
        ('{"contxt": 5}', "unknown setting 'contxt'"),
        ('{"context": 0}', "context is 0"),
        ('{"context": true}', "context is True"),
        ('{"context": "4096"}', "context is '4096'"),
        ('{"context": 1e30}', "context is 1e"),
        ('{"concurrency": -1}', "concurrency is -1"),
        ('{"concurrency": 0}', "concurrency is 0"),
        ('{"nodes": 1.5}', "nodes is 1.5"),
        ('{"dtype": "fp4"}', "dtype is 'fp4'"),
        ('{"dtype": ["int8"]}', "dtype is"),
        ('{"layers": [0, 3]}', "layers is"),
        ('{"layers": {"a": [3, 2]}}', "'a' are 3-2"),
        ('{"layers": {"a": [0]}}', "write .first, last."),
        ('{"layers": {"a": [0, true]}}', "write .first, last."),
        ('{"layers": {"a": [-1, 2]}}', "'a' are -1-2"),
        ('{"layers": {"a": [0, 5], "b": [5, 9]}}', "'a' and 5-9 of 'b' overlap"),
        ('{"exclude": "a"}', "exclude is 'a'"),
        ('{"exclude": [""]}', "exclude is"),
        (json.dumps({"exclude": ["x" * 257]}), "exclude is"),
        (json.dumps({"exclude": [str(i) for i in range(2000)]}), "exclude names 2000 nodes"),
        (json.dumps({"layers": {str(i): [i, i] for i in range(2000)}}), "layers names 2000 nodes"),
        (r'{"exclude": ["\ud800"]}', "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(value: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        Settings.from_json(value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 1000 + "]" * 1000])
def test_nesting_without_end_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        Settings.from_json(text)
