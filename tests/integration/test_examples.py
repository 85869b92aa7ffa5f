"""Each example is run as a person would, against real daemons with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import write_tiny_llama

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from local_nodes import LocalNodes  # noqa: E402  # a module of the examples

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNodes]:
    with LocalNodes(
        flags=("--memory", "700MB", "--models-dir", str(tmp_path_factory.mktemp("models")))
    ) as nodes:
        nodes.start("one")
        nodes.wait_for_members()
        nodes.wait_until_measured()
        yield nodes
    assert nodes.left_behind() == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny"))


def example(nodes: LocalNodes, name: str, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments, "--node", nodes.nodes[0].address],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{nodes.nodes[0].tail(40)}"
    return done.stdout


def test_quickstart(nodes: LocalNodes, model: str) -> None:
    out = example(nodes, "quickstart.py", model, "Hello")
    assert re.search(r"\d+ tokens, \d+\.\d tokens/s", out)
    assert re.search(r"layers 0-5 on node \S+", out)


def test_stream_chat(nodes: LocalNodes, model: str) -> None:
    out = example(nodes, "stream_chat.py", model, stdin="Hello\nAnd again\n")
    assert len(out) > 2


@pytest.mark.slow
def test_add_a_device(nodes: LocalNodes, model: str) -> None:
    nodes.start("two")
    out = example(nodes, "add_a_device.py", model, "--nodes", "2", "--timeout", "60")
    assert "now over 2 node(s):" in out
    after = out.split("now over")[1]
    assert re.search(r"layers 0-\d+ on (one|two)\n  layers \d+-5 on (one|two)", after)
    with nodes.client() as client:
        assert len(client.status().deployments[0].plan.stages) == 2
