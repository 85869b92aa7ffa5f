"""The table of deployments: merged by version, whatever the order, and kept over restarts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.cluster.state import Deployments, deployment_id, settings_satisfied

from p2pshard.client.options import settings_json
from p2pshard.planning.settings import Settings
from p2pshard.transport.generated import control_pb2 as pb


def row(
    model: str = "m", state: str = "planning", *, version: int = 0, writer: str = "", wanted: bool = True
) -> pb.Deployment:
    manifest = model.ljust(64, "0")
    return pb.Deployment(
        id=deployment_id(manifest), model=model, manifest=manifest, state=state, version=version, writer=writer,
        wanted=wanted, settings_json="{}",
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deployments.json"


def test_a_later_version_wins_and_an_older_one_never_comes_back(path: Path) -> None:
    table = Deployments(path, "a")
    kept = table.write(row(state="planning"))
    assert (kept.version, kept.writer) == (1, "a")
    assert table.merge([row(state="ready", version=5, writer="b")])
    assert not table.merge([row(state="loading", version=4, writer="z")])
    (found,) = table.all()
    assert found.state == "ready"
    assert table.write(row(state="broken")).version == 6


def test_all_orders_of_merging_give_the_same_table(tmp_path: Path) -> None:
    rows = [
        row(state="planning", version=1, writer="a"),
        row(state="removed", version=3, writer="a", wanted=False),
        row(state="ready", version=3, writer="b"),
        row(state="broken", version=2, writer="c"),
    ]
    results = set()
    for i, order in enumerate(itertools.permutations(rows)):
        table = Deployments(tmp_path / f"{i}.json", "x")
        for one in order:
            table.merge([one])
        results.add(table.all()[0].SerializeToString(deterministic=True))
    assert len(results) == 1


def test_a_tombstone_overtakes_what_an_absent_node_still_wants(tmp_path: Path) -> None:
    absent, here = Deployments(tmp_path / "1.json", "a"), Deployments(tmp_path / "2.json", "b")
    here.merge([absent.write(row())])
    gone = here.write(row(state="removed", wanted=False))
    absent.flush()
    absent = Deployments(tmp_path / "1.json", "a")
    assert absent.newer(here.versions()) == [gone.id]
    absent.merge(here.all())
    assert not absent.all()[0].wanted and here.newer(absent.versions()) == []


def test_what_is_wanted_survives_a_restart_and_another_nodes_word_on_its_state_is_taken(path: Path) -> None:
    table = Deployments(path, "a")
    ready = row(state="ready", version=7, writer="b")
    ready.endpoints.add(stage=0, node="b", port=7333)
    table.merge([ready])
    table.flush()
    again = Deployments(path, "a")
    (found,) = again.all()
    assert found.wanted and found.state == "planning" and not found.endpoints
    assert again.newer([pb.StateVersion(deployment=found.id, version=7, writer="b")]) == [found.id]
    again.merge([ready])
    assert again.all()[0].state == "ready"


@pytest.mark.parametrize(
    "change",
    [
        {"state": "nonsense"},
        {"id": "../../etc/passwd"},
        {"id": "0" * 16},
        {"version": 2**63},
        {"settings_json": "[1]"},
        {"settings_json": "{"},
        {"settings_json": '{"concurrency": "x"}'},
        {"settings_json": "[" * 100_000},
    ],
)
def test_a_row_that_is_not_well_formed_is_left_out(path: Path, change: dict[str, object]) -> None:
    bad = row(version=1, writer="b")
    for key, value in change.items():
        setattr(bad, key, value)
    table = Deployments(path, "a")
    assert table.merge([bad]) == [] and table.all() == []
    assert len(table.merge([bad, row("other", version=1, writer="b")])) == 1


@pytest.mark.parametrize("what", ["superseded", "plan"])
def test_a_row_whose_epochs_leave_no_number_above_them_is_left_out(path: Path, what: str) -> None:
    bad = row(version=1, writer="b")
    (bad.superseded if what == "superseded" else bad.plan.epoch).n = 2**63
    assert Deployments(path, "a").merge([bad]) == []


def test_find_takes_the_wanted_and_ready_one_of_a_name(path: Path) -> None:
    table = Deployments(path, "a")
    first, second = row("m"), row("m")
    second.manifest = "1" * 64
    second.id = deployment_id(second.manifest)
    first.state = "ready"
    table.write(first)
    table.write(second)
    table.write(second)
    found = table.find("m")
    assert found is not None and found.manifest == first.manifest
    assert table.find(second.id) is not None and table.find("1" * 64) is not None and table.find("x") is None


@pytest.mark.parametrize(
    ("asked", "same"),
    [
        ({}, True),
        ({"context": None, "dtype": "auto", "layers": {}, "exclude": []}, True),
        ({"context": 4096}, True),
        ({"context": 2048}, False),
        ({"dtype": "float32"}, False),
        ({"concurrency": None}, True),
        ({"concurrency": 1}, True),
        ({"concurrency": 4}, True),
        ({"concurrency": 5}, False),
        ({"nodes": 3}, False),
    ],
)
def test_what_is_not_asked_for_by_name_may_be_as_it_is(asked: dict[str, object], same: bool) -> None:
    existing = json.dumps(
        {"context": 4096, "concurrency": 4, "dtype": "auto", "nodes": None, "layers": {}, "exclude": []}
    )
    assert settings_satisfied(json.dumps(asked), existing) is same
    assert settings_satisfied(settings_json(), existing)  # what `run` asks for without flags
    assert settings_satisfied(json.dumps({"concurrency": 1}), "{}")


@pytest.mark.parametrize(
    "asked",
    [
        {"exclude": ["c", "b", "c"]},
        {"layers": {"d": [9, 11], "a": [0, 8]}, "wire": "raw"},
        {"exclude": ["b", "c"], "context": 512, "concurrency": None},
    ],
)
def test_what_is_asked_for_twice_is_the_same_as_the_first_time(asked: dict[str, object]) -> None:
    assert settings_satisfied(json.dumps(asked), Settings.from_value(asked).to_json())


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.booleans()), max_size=12))
def test_merging_is_idempotent_and_ordered(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[int, str, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    one, two = Deployments(folder / "1.json", "x"), Deployments(folder / "2.json", "y")
    rows = [row(state="ready" if w else "removed", version=v, writer=n, wanted=w) for v, n, w in story]
    latest: dict[tuple[int, str], pb.Deployment] = {}
    for r in rows:
        latest.setdefault((r.version, r.writer), r)  # one writer never gives one version to two rows
    for r in latest.values():
        one.merge([r])
        one.merge([r])
    two.merge(list(reversed(latest.values())))
    assert [r.SerializeToString() for r in one.all()] == [r.SerializeToString() for r in two.all()]
