"""The command line against a Node service of this process: what is printed where, and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pshard.cli.app import invoke
from p2pshard.cli.output import console, console_err
from p2pshard.errors import DoesNotFit, StageLost
from tests.fake_node import PLAN, STATUS, FakeNode

REFUSAL = {
    "fits": False,
    "plan": None,
    "shortfall_bytes": 1_234_567_890,
    "suggestions": ["use --context 1024", "add a node with 1.3 GB"],
    "terms": [
        {"node": "a", "term": "weights", "bytes": 2_000_000_000},
        {"node": "a", "term": "budget", "bytes": 600_000_000},
    ],
}


@pytest.fixture
def node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.fixture
def cli(node: FakeNode, capsys: pytest.CaptureFixture[str], monkeypatch):
    """Run a command line; (exit code, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        code = invoke([*arguments, "--node", node.address])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def one_object(text: str) -> dict:
    assert text.endswith("\n")
    assert text.count("\n") == 1
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def test_run_json_is_exactly_the_documented_object(cli) -> None:
    code, out, err = cli("run", "tiny", "What is the capital of France?", "--json")
    assert code == 0
    assert one_object(out) == {
        "text": "The capital is Paris.",
        "token_ids": [100, 101, 102, 103],
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "finish_reason": "stop",
        "ttft_ms": 12.5,
        "tokens_per_second": 34.5,
        "plan": PLAN.to_json(),
    }
    assert one_object(out)["plan"]["epoch"] == {"n": 1, "proposer": "id-a"}
    assert "loading" in err


def test_run_streams_the_answer_and_nothing_else_to_standard_output(cli, node: FakeNode) -> None:
    code, out, err = cli("run", "tiny", "hello")
    assert (code, out) == (0, "The capital is Paris.\n")
    for word in ("stage", "20-29", "34.5 tokens/s", "a", "fetching"):
        assert word in err
    assert node.asked[-1].WhichOneof("input") == "chat"


def test_run_passes_its_flags_on(cli, node: FakeNode) -> None:
    flags = (
        "--raw --max-tokens 7 --temperature 0.5 --top-p 0.9 --seed 3 --stop END --dtype float32 "
        "--context 512 --concurrency 2 --layers a=0-9 --layers b=10-29 --nodes 2 --exclude c --wire bf16"
    )
    code, _, _ = cli("run", "tiny", "hello", *flags.split())
    assert code == 0
    deploy = next(r for r in node.asked if hasattr(r, "settings_json"))
    assert json.loads(deploy.settings_json) == {
        "context": 512, "concurrency": 2, "dtype": "float32", "nodes": 2,
        "layers": {"a": [0, 9], "b": [10, 29]}, "exclude": ["c"], "wire": "bf16",
    }  # fmt: skip
    asked = node.asked[-1]
    assert (asked.prompt, asked.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (
        "hello",
        7,
        0.5,
        0.9,
    )
    assert (asked.has_seed, asked.sampling.seed, list(asked.stop)) == (True, 3, ["END"])


@pytest.mark.parametrize("verb", [("run", "tiny", "hello"), ("deploy", "tiny"), ("plan", "tiny")])
def test_flags_that_are_left_out_ask_for_nothing(cli, node: FakeNode, verb: tuple[str, ...]) -> None:
    """A deployment that runs is what was asked for then, whatever it has."""
    cli(*verb)
    asked = json.loads(next(r for r in node.asked if hasattr(r, "settings_json")).settings_json)
    assert {k: v for k, v in asked.items() if v not in (None, "auto", {}, [])} == {}


def test_a_prompt_from_standard_input(cli, node: FakeNode, monkeypatch) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    cli("run", "tiny", "-", "--raw", "--json")
    assert node.asked[-1].prompt == "from a pipe"


def test_plan(cli, node: FakeNode) -> None:
    code, out, _ = cli("plan", "tiny")
    assert code == 0
    assert "30 layers in 3 stages" in out
    code, out, _ = cli("plan", "tiny", "--json")
    assert (code, one_object(out)) == (0, node.plan)


def test_a_plan_that_does_not_fit_exits_3_with_the_table(cli, node: FakeNode) -> None:
    node.plan = REFUSAL
    code, out, err = cli("plan", "tiny", "--nodes", "1")
    assert (code, out) == (3, "")
    for word in ("weights", "2.00 GB", "1,234,567,890 bytes", "use --context 1024"):
        assert word in err
    code, out, _ = cli("plan", "tiny", "--json")
    assert code == 3
    assert one_object(out) == REFUSAL


def test_a_run_that_does_not_fit_exits_3_with_the_table(cli, node: FakeNode) -> None:
    node.error = DoesNotFit(
        "tiny does not fit", **{k: REFUSAL[k] for k in ("shortfall_bytes", "suggestions", "terms")}
    )
    code, out, err = cli("run", "tiny", "x")
    assert (code, out) == (3, "")
    assert "tiny does not fit" in err
    assert "weights" in err


def test_status(cli) -> None:
    code, out, _ = cli("status")
    assert code == 0
    for word in ("id-a", "600 MB", "10.0.0.9:7332", "speaks protocol 2", "ready", "peak 300 MB"):
        assert word in out
    code, out, _ = cli("status", "--json")
    assert (code, one_object(out)) == (0, STATUS)


def test_ps(cli) -> None:
    code, out, err = cli("ps")
    assert code == 0
    for word in ("r1", " b ", "running", "128", "2,048"):
        assert word in out
    assert "not listed: node c (no answer in 1.5 s)" in err
    code, out, _ = cli("ps", "--json")
    assert one_object(out)["kv"] == [{"node": "id-a", "blocks_used": 1, "blocks_total": 128}]


def test_deploy_and_undeploy(cli, node: FakeNode) -> None:
    code, out, _ = cli("deploy", "tiny", "--json")
    assert (code, one_object(out)) == (0, {"model": "tiny", "state": "ready", "plan": PLAN.to_json()})
    code, out, _ = cli("undeploy", "tiny")
    assert (code, out) == (0, "")
    assert node.asked[-1].model == "tiny"


def test_down_waits_until_the_daemon_is_gone(cli, node: FakeNode) -> None:
    code, _, err = cli("down")
    assert (code, node.shut_down.is_set()) == (0, True)
    assert "stopped" in err
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", node.port)) != 0


def test_down_waits_for_a_daemon_that_ends_its_workers_after_it_stopped_answering(
    cli, node: FakeNode
) -> None:
    ending = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    node.pid = ending.pid
    code, _, err = cli("down")
    assert code == 0 and "is stopped" in err
    assert ending.poll() == 0  # nobody had waited for it: it ended, and stood in the table of processes


def test_down_says_so_when_the_process_stays(cli, node: FakeNode) -> None:
    node.pid = os.getpid()
    code, _, err = cli("down", "--timeout", "1")
    assert code == 0 and f"process {os.getpid()} is still there" in err


def test_leave_waits_until_the_daemon_is_gone(cli, node: FakeNode) -> None:
    code, _, err = cli("leave")
    assert code == 0 and "is stopped" in err and not node.shut_down.is_set()
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", node.port)) != 0


def test_pause_and_resume(cli, node: FakeNode) -> None:
    code, out, err = cli("pause", "b")
    assert (code, out) == (0, "") and "b is paused" in err
    assert (node.asked[-1].node, node.asked[-1].resume) == ("b", False)
    code, _, err = cli("resume", "b")
    assert code == 0 and "takes part again" in err and node.asked[-1].resume
    node.pause_error = DoesNotFit("too much", shortfall_bytes=7, terms=[], suggestions=["add a node"])
    code, _, err = cli("pause", "b")
    assert code == 3 and "too much" in err and "add a node" in err


def test_keys(cli, node: FakeNode) -> None:
    code, out, err = cli("keys", "create", "phone", "--per-minute", "30", "--at-once", "2")
    assert (code, out) == (0, "p2psk-abc\n") and "not shown again" in err
    asked = node.asked[-1]
    assert (asked.create, asked.per_minute, asked.at_once) == ("phone", 30, 2)
    code, out, _ = cli("keys", "list")
    assert code == 0 and "phone" in out and "30" in out
    code, out, _ = cli("keys", "list", "--json")
    assert one_object(out)["keys"][0]["name"] == "phone"
    code, _, err = cli("keys", "revoke", "phone")
    assert code == 0 and node.asked[-1].revoke == "phone" and "phone" in err
    assert cli("keys", "create", "x", "--per-minute", "0")[0] == 2


def test_an_error_under_json_is_one_object_too(cli, node: FakeNode) -> None:
    node.error = StageLost("node b is gone", node="b", layers=[10, 19])
    code, out, err = cli("run", "tiny", "x", "--json")
    assert code == 1
    assert one_object(out)["error"] == {
        "code": "stage_lost",
        "message": "node b is gone",
        "details": {"node": "b", "layers": [10, 19]},
    }
    assert "node b is gone" in err


def test_no_node_exits_4(capsys) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    for verb in (
        ["status"],
        ["ps"],
        ["ls"],
        ["plan", "m"],
        ["deploy", "m"],
        ["undeploy", "m"],
        ["run", "m", "p"],
        ["down"],
        ["leave"],
        ["pause", "b"],
        ["resume", "b"],
        ["keys", "list"],
    ):
        assert invoke([*verb, "--node", address]) == 4, verb
        assert address in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "run",
        "run tiny",
        "nonsense",
        "run tiny x --temperature hot",
        "run tiny x --top-p 0",
        "plan tiny --layers a",
        "plan tiny --layers a=9-3",
        "plan tiny --layers a=0-1 --layers a=2-3",
        "plan tiny --dtype int3",
        "status --node host:0",
        "up --port x",
        "up --memory lots",
        "up --device tpu",
    ],
)
def test_wrong_usage_exits_2(arguments: str, capsys) -> None:
    assert invoke(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert (out, bool(err)) == ("", True)


@pytest.mark.parametrize(
    "arguments", ["status --bogus --json", "run tiny --json", "run tiny x --json --max-tokens 0"]
)
def test_wrong_usage_under_json_is_one_object_too(arguments: str, capsys) -> None:
    assert invoke(arguments.split()) == 2
    out, err = capsys.readouterr()
    error = one_object(out)["error"]
    assert error["code"] == "usage" and error["message"] in err


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_a_prompt_that_is_no_text_is_wrong_usage(verb: str, cli, node: FakeNode, monkeypatch) -> None:
    bad = b"caf\xe9".decode("utf-8", "surrogateescape")
    if verb == "run":
        for flags in ([], ["--raw"], ["--stop", bad]):
            code, out, err = cli("run", "tiny", "x" if "--stop" in flags else bad, "--json", *flags)
            assert (code, one_object(out)["error"]["code"]) == (2, "invalid_request"), err
            assert "not UTF-8" in err
    else:
        lines = iter([bad, "/help", "/exit"])
        monkeypatch.setattr("builtins.input", lambda _: next(lines))
        code, out, err = cli("chat", "tiny")
        assert (code, out) == (0, "") and "not UTF-8" in err and "no /help" in err
    assert not [r for r in node.asked if hasattr(r, "sampling")]


def test_a_plan_and_the_models_are_whole_on_a_console_of_80_columns(cli, monkeypatch) -> None:
    for stream in (console, console_err):
        monkeypatch.setattr(stream, "_width", 80)
    _, out, _ = cli("plan", "tiny")
    for text in ("node", "device", "layers", "weights", "budget", "0-9", "10-19"):
        assert text in out, text
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    _, out, _ = cli("ls")
    assert "qwen2.5-coder-1.5b-instruct" in out


def test_a_local_file_and_a_remote_node(capsys, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    # an address of this machine is local whatever it is called; a name that does not resolve is not
    assert invoke(["plan", str(tmp_path / "m.gguf"), "--node", "192.0.2.1:1"]) in (2, 4)


def test_up_without_the_node_extra_says_what_to_install(capsys, monkeypatch, tmp_path: Path) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else real(name, *a)
    )
    assert invoke(["up", "--data-dir", str(tmp_path)]) == 1
    assert "pip install 'p2pshard[node]'" in capsys.readouterr().err


def test_help_names_every_verb_and_exit_code(capsys) -> None:
    assert invoke(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in (
        *("up", "leave", "down", "status", "pause", "resume", "plan", "pull", "ls", "deploy", "undeploy"),
        *("ps", "keys", "run", "chat"),
    ):
        assert f"\n  {verb} " in out
    for code in (
        "0    done",
        "1    failed",
        "2    wrong usage",
        "3    the model does not fit",
        "4    no cluster",
        "130  interrupted",
    ):
        assert code in out


def test_version(capsys) -> None:
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("p2pshard 0.")


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_interrupting_a_run_cancels_the_request_and_exits_130(node: FakeNode, extra: list[str]) -> None:
    node.words, node.between_s = ["word "] * 10_000, 0.02
    run = subprocess.Popen(
        [sys.executable, "-m", "p2pshard.cli", "run", "tiny", "x", "--node", node.address, *extra],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 30
        while not any(hasattr(r, "sampling") for r in list(node.asked)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=10)
    finally:
        if run.poll() is None:
            run.kill()
            run.wait()
    assert run.returncode == 130, err
    if "--json" in extra:
        assert one_object(out.decode())["error"]["code"] == "interrupted"
    assert node.cancelled.wait(2)
    assert b"Traceback" not in err


def test_chat_keeps_what_was_said(cli, node: FakeNode, monkeypatch) -> None:
    lines = iter(["first", "second", "/reset", "third", "/exit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    code, out, _ = cli("chat", "tiny", "--system", "Be brief.")
    assert (code, out) == (0, "The capital is Paris.\n" * 3)
    talks = [[(m.role, m.content) for m in r.chat.messages] for r in node.asked if hasattr(r, "chat")]
    assert talks[1] == [
        ("system", "Be brief."),
        ("user", "first"),
        ("assistant", "The capital is Paris."),
        ("user", "second"),
    ]
    assert talks[2] == [("system", "Be brief."), ("user", "third")]
