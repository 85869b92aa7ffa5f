"""20,000 tokens of a model as wide as large ones, over real daemons: each step's hidden states exceed a gRPC message."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2pshard import Client
from p2pshard.errors import ContextExceeded
from p2pshard.transport.channels import MAX_MESSAGE
from p2pshard.transport.frames import CHUNK_BYTES
from tests.local_cluster import LocalCluster
from tests.tiny import write_tiny_llama

HIDDEN, TOKENS, CONTEXT = 9216, 20_000, 24_576
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def greedy(folder: Path, ids: list[int], count: int) -> list[int]:
    """Of plain transformers, with a cache and an attention that does not hold all pairs of so many tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_20_000_tokens_pass_in_frames_that_no_message_could_hold(tmp_path: Path) -> None:
    folder = write_tiny_llama(
        tmp_path / "wide", layers=3, hidden=HIDDEN, inner=64, head_width=16, context=32_768
    )
    ids = [i * 7 % 256 for i in range(TOKENS)]
    with LocalCluster(tmp_path, "--memory", "1GB") as cluster, Client([cluster.nodes[2].address]) as client:
        cluster.wait_measured()
        plan = client.deploy(str(folder), nodes=3, context=CONTEXT, dtype="float32").plan
        assert plan is not None
        frame = plan.chunk_tokens * HIDDEN * 4
        assert frame > MAX_MESSAGE > 4 << 20 > CHUNK_BYTES, (
            f"{frame} bytes; whoever receives refuses larger chunks"
        )
        got = client.generate("wide", ids, max_tokens=3, temperature=0, ignore_eos=True).result()
        assert got.prompt_tokens == TOKENS
        print(
            f"{TOKENS} tokens in steps of {plan.chunk_tokens}: first token after {got.ttft_ms / 1000:.1f} s"
        )
        assert list(got.token_ids) == greedy(folder, ids, 3)
        with pytest.raises(ContextExceeded, match=rf"{CONTEXT + 1}.*{CONTEXT}"):
            client.generate("wide", [1] * (CONTEXT + 1), max_tokens=3).text  # noqa: B018
