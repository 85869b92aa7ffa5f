from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.gateway.requests import Outcome, RequestLog, RequestTable

from p2pshard.errors import Overloaded, ProtocolError


def test_only_the_next_index_of_the_current_attempt_is_taken() -> None:
    log = RequestLog(10)
    assert log.append(1, 0, [5, 6]) == 2
    assert log.append(1, 1, [9]) == 0  # stands there already
    assert log.append(2, 2, [9]) == 0  # another attempt
    with pytest.raises(ProtocolError, match="token 3 came where 2 was due"):
        log.append(1, 3, [9])
    assert log.ids == [5, 6]


def test_a_higher_attempt_fences_the_lower() -> None:
    log = RequestLog(10)
    log.append(1, 0, [5])
    assert log.next_attempt() == 2
    assert log.append(1, 1, [6]) == 0
    assert log.append(2, 1, [7]) == 1
    assert log.ids == [5, 7]


def test_never_more_than_max_tokens() -> None:
    log = RequestLog(3)
    assert log.append(1, 0, [1, 2, 3, 4]) == 3
    assert log.append(1, 3, [5]) == 0
    assert log.ids == [1, 2, 3]


def test_the_first_end_stays() -> None:
    log = RequestLog(10)
    assert log.end(Outcome("cancelled"))
    assert not log.end(Outcome("stop"))
    assert log.append(1, 0, [1]) == 0
    assert log.outcome == Outcome("cancelled") and log.ids == []


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.integers(0, 6), st.lists(st.integers(0, 9), max_size=3)), max_size=20
    )
)
def test_whatever_arrives_the_log_is_the_first_of_each_index(
    messages: list[tuple[int, int, list[int]]],
) -> None:
    log = RequestLog(5)
    expected: list[int] = []
    for attempt, index, ids in messages:
        try:
            log.append(attempt, index, ids)
        except ProtocolError:
            assert attempt == 1 and index > len(expected)
        if attempt == 1 and index == len(expected):
            expected = (expected + ids)[:5]
        assert log.ids == expected


@dataclass
class Request:
    id: str
    log: RequestLog = field(default_factory=lambda: RequestLog(1))


def test_the_table_and_its_history_are_bounded() -> None:
    table: RequestTable[Request] = RequestTable(2, history=3)
    for number in range(5):
        request = Request(str(number))
        table.add(request)
        request.log.end(Outcome("stop"))
        table.remove(request)
    assert [table.outcome(str(n)) for n in range(5)] == [None, None, *[Outcome("stop")] * 3]
    table.add(Request("a"))
    table.add(Request("b"))
    with pytest.raises(Overloaded, match="already carries 2"):
        table.add(Request("c"))
    assert len(table) == 2
