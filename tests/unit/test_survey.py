"""What the members' answers come to: models by content, and a name's one meaning. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from p2pshard_node.cluster.survey import merge_models, one_meaning

from p2pshard.errors import InvalidRequest
from p2pshard.transport.generated import control_pb2 as pb

A, B = "a" * 64, "b" * 64


def held(name: str, manifest: str = "", size: int = 5) -> pb.HeldModel:
    return pb.HeldModel(name=name, size_bytes=size, manifest=manifest)


def test_one_row_per_content_with_all_its_nodes() -> None:
    rows = merge_models({"n0": [held("m", A)], "n1": [held("m", A), held("k", B)], "n2": [held("m", B)]})
    assert [(r["name"], r["digest"], r["nodes"]) for r in rows] == [
        ("k", B, ["n1"]),
        ("m", A, ["n0", "n1"]),
        ("m", B, ["n2"]),
    ]


def test_a_file_that_nobody_hashed_counts_as_the_only_content_of_its_name_and_size() -> None:
    (row,) = merge_models({"n0": [held("m")], "n1": [held("m", A)]})
    assert (row["digest"], row["nodes"]) == (A, ["n1", "n0"])
    (row,) = merge_models({"n0": [held("m")], "n1": [held("m")]})
    assert (row["digest"], row["nodes"]) == (None, ["n0", "n1"])
    assert len(merge_models({"n0": [held("m")], "n1": [held("m", A)], "n2": [held("m", B)]})) == 3
    assert len(merge_models({"n0": [held("m")], "n1": [held("m", A, size=6)]})) == 2


@given(
    st.dictionaries(
        st.sampled_from(["n0", "n1", "n2", "n3"]),
        st.lists(
            st.builds(held, st.sampled_from(["m", "k"]), st.sampled_from(["", A, B]), st.integers(1, 2)),
            max_size=4,
        ),
    )
)
def test_no_model_of_a_node_is_lost_or_listed_under_another_content(
    nodes: dict[str, list[pb.HeldModel]],
) -> None:
    rows = merge_models(nodes)
    assert sum(len(r["nodes"]) for r in rows) == sum(len(models) for models in nodes.values())
    for node, models in nodes.items():
        for model in models:
            matching = [
                r
                for r in rows
                if (r["name"], r["size_bytes"]) == (model.name, model.size_bytes) and node in r["nodes"]
            ]
            assert any(model.manifest in ("", r["digest"]) for r in matching)
    keys = [(r["name"], r["size_bytes"], r["digest"]) for r in rows]
    assert len(keys) == len(set(keys))


def test_a_name_has_one_meaning_or_is_refused_with_both() -> None:
    names = {"n1": "bob", "n2": "cid"}
    found = one_meaning("m", {"n2": A, "n1": A}, names)
    assert (found.manifest, found.holders) == (A, ("n1", "n2"))
    with pytest.raises(InvalidRequest) as caught:
        one_meaning("m", {"n1": A, "n2": B}, names)
    for part in ("bob", "cid", A[:12], B[:12], "--node"):
        assert part in caught.value.message
