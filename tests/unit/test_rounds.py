"""Control loops outlive an error of one round."""

from __future__ import annotations

import asyncio
import logging

import pytest
from p2pshard_node.rounds import Rounds


def test_an_error_ends_its_round_only_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rounds, done = Rounds("lab", logging.getLogger("lab")), []
    for i in range(5):
        with rounds.one():
            if i != 2:
                raise OSError("no space left on device")
            done.append(i)
    assert done == [2]
    assert caplog.text.count("lab: a round failed, the next one comes: OSError: no space left on device") == 1
    with rounds.one():
        raise ValueError("another")
    assert "ValueError: another" in caplog.text


def test_a_cancellation_passes() -> None:
    with pytest.raises(asyncio.CancelledError), Rounds("lab", logging.getLogger("lab")).one():
        raise asyncio.CancelledError
