"""Real worker processes, edges and streams: what comes out equals plain transformers in one process."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pshard.planning.plan import Epoch, Plan
from p2pshard.planning.wire import with_wires
from tests.attack import attack
from tests.tiny import reference_tokens, write_tiny_llama
from tests.worker_lab import Gateway, make_plan, ring

pytestmark = pytest.mark.timeout(240)
PROMPTS = [
    [1],
    [5, 9, 200],
    list(range(40, 57)),
    [7] * 130,
    [3, 1, 4, 1, 5],
    list(range(90)),
    [250, 2],
    [11] * 33,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_llama(tmp_path_factory.mktemp("workers") / "tiny", layers=6, context=32768)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [reference_tokens(model, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow), 3])
async def test_greedy_tokens_equal_the_reference_and_eight_at_once_their_solo(
    model: Path, expected: list[list[int]], tmp_path: Path, stages: int
) -> None:
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, stages)) as r, r.gateway() as gateway:
        for event in r.loaded:
            assert event["weight_bytes"] > 0 and event["peak_bytes"] >= event["base_bytes"] > 0
        for i in range(3):
            assert await gateway.generate(f"solo{i}", PROMPTS[i], 24) == expected[i]
        for order in ([0, 1, 2, 3, 4, 5, 6, 7], [6, 1, 4, 0, 7, 3, 2, 5]):
            names = [f"{order[0]}-{i}" for i in order]
            results = await asyncio.gather(
                *(gateway.generate(name, PROMPTS[i], 24) for name, i in zip(names, order, strict=True))
            )
            assert results == [expected[i] for i in order]
        assert (await r.workers[0].stats())["step"]["max_rows"] >= 4
        # Carried on in the middle: prompt and given tokens replayed, the rest the same.
        assert await gateway.generate("resumed", PROMPTS[2], 24, output_ids=expected[2][:10]) == expected[2]
        # An end token ends it, and is given.
        cut = expected[1].index(expected[1][5])
        assert await gateway.generate("eos", PROMPTS[1], 24, eos=[expected[1][5]]) == expected[1][: cut + 1]
        await r.idle()


async def test_one_step_at_a_time_on_two_stages(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    plan = lambda m, n: make_plan(m, n, 2, blocks=10, context=160, concurrency=1, chunk_tokens=7)  # noqa: E731
    async with ring(model, tmp_path, plan, load={"window": 1}) as r, r.gateway() as gateway:
        results = await asyncio.gather(*(gateway.generate(f"r{i}", PROMPTS[i], 24) for i in range(4)))
        assert results == expected[:4]
        assert (await r.workers[0].stats())["step"]["window"] == 1
        await r.idle()


@pytest.mark.slow
async def test_thirty_two_requests_with_one_prefix_compute_it_once(model: Path, tmp_path: Path) -> None:
    begin = [(7 * i + i // 9) % 250 for i in range(1000)]
    prompts = [[*begin, i, 3, 5] for i in range(32)]
    expected = [reference_tokens(model, prompts[i], 8) for i in (0, 13, 31)]
    plan = lambda m, n: make_plan(m, n, 2, context=2048, chunk_tokens=128)  # noqa: E731
    async with ring(model, tmp_path, plan) as r, r.gateway() as gateway:
        results = await asyncio.gather(
            *(gateway.generate(f"r{i}", prompt, 8) for i, prompt in enumerate(prompts))
        )
        assert [results[i] for i in (0, 13, 31)] == expected
        step = (await r.workers[0].stats())["step"]
        assert step["hit_tokens"] == 31 * (1000 // 16 * 16)
        # Later, with penalties: the last stage knows the ids of positions that never came by again.
        options = {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 5}
        again = await gateway.generate("again", prompts[4], 12, **options)
        assert (await r.workers[0].stats())["step"]["hit_tokens"] > step["hit_tokens"] + 900
        await r.idle()
    async with ring(model, tmp_path / "other", plan) as r, r.gateway() as gateway:
        assert await gateway.generate("fresh", prompts[4], 12, **options) == again


async def test_a_pool_too_small_for_all_preempts_and_changes_no_token(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    plan = lambda m, n: make_plan(m, n, 2, blocks=40, context=160, block_size=4)  # noqa: E731
    async with ring(model, tmp_path, plan) as r, r.gateway() as gateway:
        names = {f"r{i}-{k}": i for k in range(3) for i in (0, 1, 2, 4, 5, 6)}
        results = await asyncio.gather(*(gateway.generate(name, PROMPTS[i], 24) for name, i in names.items()))
        assert results == [expected[i] for i in names.values()]
        assert (await r.workers[0].stats())["step"]["preempted"] > 0
        await r.idle()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 3])
async def test_text_is_the_same_with_and_without_drafts(model: Path, tmp_path: Path, stages: int) -> None:
    settings = (
        {},
        {"temperature": 0.9, "seed": 3},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "logprobs": 1},
    )
    repeating = [[*range(40, 60)] * 4, PROMPTS[3]]  # and what a greedy tiny model says repeats itself anyway
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, stages)) as r, r.gateway() as gateway:

        async def texts(draft: int) -> list[list[int]]:
            return await asyncio.gather(
                *(
                    gateway.generate(f"{draft}-{i}-{k}", prompt, 60, draft=draft, **options)
                    for i, prompt in enumerate((*repeating, *PROMPTS[:3]))
                    for k, options in enumerate(settings)
                )
            )

        plain = await texts(0)
        assert (await r.workers[0].stats())["step"]["drafted"] == 0
        for draft in (-1, 1, 4, 16):
            assert await texts(draft) == plain
        step = (await r.workers[0].stats())["step"]
        assert 50 < step["accepted"] < step["drafted"]
        await r.idle()


@pytest.mark.slow
async def test_no_bit_depends_on_sharing_preemption_drafts_or_the_cut(model: Path, tmp_path: Path) -> None:
    """Drawn (nearly greedy, so that drafts are right at times), with logprobs, on the path whose numbers depend on nothing but the tokens: `==` on floats."""
    begin = [*range(30, 50)] * 2
    prompts = [[*begin, *range(i, i + 9)] for i in range(8)]
    options = {"temperature": 0.02, "seed": 11, "logprobs": 3}

    def plan(manifest: str, layers: int, **sizes: int) -> Plan:
        return make_plan(manifest, layers, context=96, dtype="int8", **sizes)

    # One after the other in blocks as large as the context: nothing is shared, preempted or drafted.
    large = functools.partial(plan, stages=1, block_size=96)
    async with ring(model, tmp_path / "1", large) as r, r.gateway() as gateway:
        assert r.loaded[0]["numerics"] == "invariant"
        alone = [await gateway.generate(f"r{i}", p, 40, **options) for i, p in enumerate(prompts)]
        numbers = [gateway.logprobs[f"r{i}"] for i in range(8)]
        assert (await r.workers[0].stats())["step"]["hit_tokens"] == 0
    small = functools.partial(plan, stages=3, block_size=4, blocks=48, chunk_tokens=16)
    async with ring(model, tmp_path / "3", small) as r, r.gateway() as gateway:
        drafts = (0, 2, 4)
        together = await asyncio.gather(
            *(gateway.generate(f"r{i}", p, 40, draft=drafts[i % 3], **options) for i, p in enumerate(prompts))
        )
        step = (await r.workers[0].stats())["step"]
        assert step["hit_tokens"] > 0 and step["preempted"] > 0 and step["drafted"] > 0
        assert together == alone
        assert [gateway.logprobs[f"r{i}"] for i in range(8)] == numbers
        await r.idle()


@pytest.mark.slow
async def test_sampled_text_does_not_depend_on_the_partition(model: Path, tmp_path: Path) -> None:
    texts = []
    for stages in (1, 3):
        folder = tmp_path / str(stages)
        plan = functools.partial(make_plan, stages=stages)
        async with ring(model, folder, plan) as r, r.gateway() as gateway:
            options = {"temperature": 1.5, "top_p": 0.95, "seed": 7, "logprobs": 2}
            texts.append(await gateway.generate("s", PROMPTS[1], 20, **options))
            assert all(len(t.top) == 2 and t.logprob < 0 for t in gateway.logprobs["s"])
    assert texts[0] == texts[1] and len(set(texts[0])) > 3


async def test_cancel_disconnect_and_deadline_free_every_block(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    rng = random.Random(3)
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, 3, context=2048, concurrency=2)) as r:
        async with r.gateway() as gateway:
            await gateway.submit("late", PROMPTS[1], 1000, deadline_s=0.3)
            assert await gateway.end("late", 3) == "deadline"
            for i in range(12):
                await gateway.submit(f"c{i}", PROMPTS[i % 8], 1000)
            for i in rng.sample(range(12), 12):
                await asyncio.sleep(rng.random() * 0.05)
                await gateway.cancel(f"c{i}")
            for i in range(12):
                assert await gateway.end(f"c{i}", 5) == "cancelled"
            await r.idle()
            await gateway.submit("dropped", PROMPTS[1], 1000)
            await gateway.given("dropped", 20)
        await r.idle(2.0)
        async with r.gateway() as gateway:
            assert await gateway.generate("after", PROMPTS[0], 24) == expected[0]


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_killed_stage_is_named_at_the_gateway(model: Path, tmp_path: Path, victim: int) -> None:
    async with (
        ring(model, tmp_path, lambda m, n: make_plan(m, n, 3, context=2048)) as r,
        r.gateway() as gateway,
    ):
        await gateway.submit("a", PROMPTS[1], 1500)
        await gateway.submit("b", PROMPTS[2], 1500)
        await gateway.given("a", 20)
        began = time.monotonic()
        r.workers[victim].kill()
        for name in ("a", "b"):
            error = await gateway.end(name, 5)
            assert error.code == "stage_lost"
            details = json.loads(error.details_json)
            assert details["node"] == f"n{victim}" and details["layers"] == [2 * victim, 2 * victim + 1]
        assert time.monotonic() - began < 2
        event = await r.workers[0].expect("edge_lost", seconds=2)
        assert event["stage"] == victim and event["error"]["details"]["node"] == f"n{victim}"
        await gateway.submit("later", PROMPTS[1], 4)
        assert (await gateway.end("later", 2)).code == "stage_lost"


@pytest.mark.slow
async def test_a_killed_driver_is_noticed_by_the_others(model: Path, tmp_path: Path) -> None:
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, 3)) as r:
        r.workers[0].kill()
        for other in (1, 2):
            event = await r.workers[other].expect("edge_lost", seconds=3)
            assert event["error"]["details"]["node"] == "n0"


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 2])
async def test_a_frozen_stage_is_found_by_the_watchdog(model: Path, tmp_path: Path, victim: int) -> None:
    async with (
        ring(model, tmp_path, lambda m, n: make_plan(m, n, 3, context=2048)) as r,
        r.gateway() as gateway,
    ):
        await gateway.submit("a", PROMPTS[1], 1500)
        await gateway.given("a", 10)
        r.workers[victim].kill(signal.SIGSTOP)
        try:
            error = await gateway.end("a", 8)
        finally:
            r.workers[victim].kill(signal.SIGCONT)
        assert error.code == "stage_lost" and json.loads(error.details_json)["node"] == f"n{victim}", (
            error.message
        )
        assert "silent" in error.message


@pytest.mark.slow
async def test_frames_above_four_mebibytes_pass(model: Path, tmp_path: Path) -> None:
    prompt = [(i * 7919) % 250 for i in range(20_000)]
    plan = lambda m, n: make_plan(m, n, 2, context=24_000, concurrency=1, chunk_tokens=24_000)  # noqa: E731
    async with ring(model, tmp_path, plan) as r, r.gateway() as gateway:
        await gateway.submit("long", prompt, 4)
        assert await gateway.end("long", 150) == "length"  # 20,000 tokens of 256 bytes: one step of 5 MB
        await gateway.submit("too long", prompt + prompt, 4)
        error = await gateway.end("too long", 5)
        assert error.code == "context_length_exceeded"
        assert json.loads(error.details_json) == {"prompt_tokens": 40_000, "context": 24_000}


async def test_a_gateway_that_never_reads_stalls_nobody(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, 2, context=2048)) as r:
        deaf = Gateway(r.plan, r.ports[0])
        async with deaf:
            deaf._reader.cancel()
            for i in range(4):
                await deaf.submit(f"deaf{i}", PROMPTS[i], 1500, logprobs=20)
            async with r.gateway() as gateway:
                for i in range(4):
                    assert await gateway.generate(f"r{i}", PROMPTS[i], 24) == expected[i]
        await r.idle()


async def test_why_it_is_not_ready_is_said_and_passes(model: Path, tmp_path: Path) -> None:
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, 2), start=False) as r:
        r.activate(0)
        event = await r.workers[0].expect("not_ready", seconds=10)
        assert "stage 1 (node n1" in event["reason"]
        assert not any(e["ev"] == "ready" for e in r.workers[0].events)
        async with r.gateway() as gateway:
            await gateway.submit("early", [1], 2)
            assert (await gateway.end("early", 2)).code == "not_ready"
            r.activate(1)
            await r.workers[0].expect("ready", seconds=10)
            assert len(await gateway.generate("now", [1], 2)) == 2


async def test_control_messages_that_cannot_be_right_are_refused(model: Path, tmp_path: Path) -> None:
    def plan(manifest: str, layers: int) -> Plan:
        return make_plan(manifest, layers, 1)

    async with ring(model, tmp_path, plan) as r:
        worker = r.workers[0]
        for message in ({"op": "load"}, {"op": "activate", "deployment": "x"}, {"op": "what"}, {}):
            after = len(worker.events)
            worker.control.send(message)
            await worker.expect("refused", after=after, seconds=5)
        assert (await worker.stats())["blocks_used"] == 0


@pytest.mark.slow
async def test_ten_thousand_mutations_against_the_data_port_harm_nobody(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    async with ring(model, tmp_path, lambda m, n: make_plan(m, n, 2)) as r, r.gateway() as gateway:
        before = [(await w.stats())["peak_bytes"] for w in r.workers]
        stop = asyncio.Event()

        async def valid() -> int:
            count = 0
            while not stop.is_set():
                i = count % 4
                assert await gateway.generate(f"valid{count}", PROMPTS[i], 24) == expected[i]
                count += 1
            return count

        stream = asyncio.create_task(valid())
        try:
            sent = await attack(r.plan, r.ports, 10_000, seed=5)
        finally:
            stop.set()
        assert await stream >= 4
        assert sent == 10_000
        after = [(await w.stats())["peak_bytes"] for w in r.workers]
        assert all(w.process.returncode is None for w in r.workers)
        assert all(b - a < 64 << 20 for a, b in zip(before, after, strict=True)), (before, after)
        assert not any(e["ev"] == "edge_lost" for w in r.workers for e in w.events)
        await r.idle()


@pytest.mark.slow
async def test_rounded_hidden_states_keep_logprobs_near(model: Path, tmp_path: Path) -> None:
    """The first token's logprobs of eight prompts, over two stages: near to raw, and not equal to it."""

    async def first_tokens(how: str) -> list[dict[int, float]]:
        def plan_of(manifest: str, layers: int) -> Plan:
            return with_wires(make_plan(manifest, layers, 2), how, [], 64)

        folder = tmp_path / how
        folder.mkdir()
        async with ring(model, folder, plan_of) as r, r.gateway() as gateway:
            for i, prompt in enumerate(PROMPTS):
                await gateway.generate(f"r{i}", prompt, 1, logprobs=20)
            return [{t.id: t.logprob for t in gateway.logprobs[f"r{i}"][0].top} for i in range(len(PROMPTS))]

    raw = await first_tokens("raw")
    for wire, most in (("bf16", 0.05), ("q8", 0.25)):
        rounded = await first_tokens(wire)
        gaps = [abs(a[i] - b[i]) for a, b in zip(raw, rounded, strict=True) for i in a.keys() & b.keys()]
        assert len(gaps) > 10 * len(PROMPTS)
        assert 0 < max(gaps) < most, (wire, max(gaps))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
async def test_the_next_epoch_is_loaded_beside_the_one_that_serves(
    model: Path, tmp_path: Path, dtype: str
) -> None:
    """Other layers on both stages; answers go on meanwhile, and after the change where they were."""
    plan = lambda m, n: make_plan(m, n, 2, cuts=[4], context=2048, dtype=dtype)  # noqa: E731
    async with ring(model, tmp_path, plan) as r:
        async with r.gateway() as gateway:
            undisturbed = await gateway.generate("whole", PROMPTS[2], 600)
            await gateway.submit("a", PROMPTS[2], 600)
            await gateway.given("a", 20)
            before, weights = len(gateway.tokens["a"]), [e["weight_bytes"] for e in r.loaded]
            after = make_plan(r.plan.manifest, 6, 2, cuts=[3], context=2048, dtype=dtype)
            after = dataclasses.replace(after, epoch=Epoch(2, "n0"))
            await r.load(after, beside=True)
            assert len(gateway.tokens["a"]) > before, "it served while it loaded"
            assert not gateway.ends["a"].done()
            read = [e["read_bytes"] for e in r.loaded]
            assert read[0] == 0 < read[1], "a layer went from the first to the second"
            assert r.loaded[0]["weight_bytes"] < weights[0]
            await r.ready()
            error = await gateway.end("a", 5)
            assert error.code in ("conflict", "stage_lost")
            given = gateway.tokens["a"]
        async with r.gateway() as gateway:
            rest = await gateway.generate("a", PROMPTS[2], 600, output_ids=given)
            assert rest == undisturbed
        await r.idle()


@pytest.mark.slow
async def test_what_is_loaded_beside_and_given_up_disturbs_nothing(model: Path, tmp_path: Path) -> None:
    plan = lambda m, n: make_plan(m, n, 2, cuts=[4], context=2048, dtype="int8")  # noqa: E731
    async with ring(model, tmp_path, plan) as r, r.gateway() as gateway:
        expected = await gateway.generate("whole", PROMPTS[2], 300)
        first, loaded = r.plan, r.loaded
        await gateway.submit("a", PROMPTS[2], 300)
        after = make_plan(first.manifest, 6, 2, cuts=[3], context=2048, dtype="int8")
        await r.load(dataclasses.replace(after, epoch=Epoch(2, "n0")), beside=True)
        for worker in r.workers:
            worker.control.send({"op": "discard"})
        assert await gateway.end("a") == "length" and gateway.tokens["a"] == expected
        # the one that was given up cannot be activated any more; another can be prepared
        r.workers[0].control.send(
            {"op": "activate", "deployment": "dep-1", "epoch": [2, "n0"], "digest": r.plan.digest(),
             "numerics": "invariant", "next": ["127.0.0.1", 1], "back": None}
        )  # fmt: skip
        async with asyncio.timeout(5):
            while not any(e["ev"] == "refused" for e in r.workers[0].events):
                await asyncio.sleep(0.01)
        r.workers[0].events.clear()
        await r.load(dataclasses.replace(after, epoch=Epoch(3, "n0")), beside=True)
        r.plan, r.loaded = first, loaded
        assert await gateway.generate("b", PROMPTS[2], 300) == expected


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(([4], [4]), marks=pytest.mark.slow),
        ([4], [2]),
        pytest.param(([2], [5]), marks=pytest.mark.slow),
    ],
    ids=["same", "back", "forward"],
)
async def test_an_epoch_takes_over_what_the_one_before_it_had_computed(
    model: Path, tmp_path: Path, cuts: tuple[list[int], list[int]]
) -> None:
    """Blocks of running sequences, whatever layers go from one worker to the other; the rest is computed again."""
    plan = lambda m, n: make_plan(m, n, 2, cuts=cuts[0], context=2048, dtype="int8")  # noqa: E731
    async with ring(model, tmp_path, plan) as r:
        before, targets = r.plan, [["127.0.0.1", port] for port in r.ports]
        async with r.gateway() as gateway:
            names = {"a": PROMPTS[2], "b": PROMPTS[3]}
            whole = {
                n: await gateway.generate(f"{n} whole", p, 400, seed=3, temperature=0.8)
                for n, p in names.items()
            }
            for name, prompt in names.items():
                await gateway.submit(name, prompt, 400, seed=3, temperature=0.8)
            for name in names:
                await gateway.given(name, 100)
            after = make_plan(before.manifest, 6, 2, cuts=cuts[1], context=2048, dtype="int8")
            await r.load(
                dataclasses.replace(after, epoch=Epoch(2, "n0")),
                beside=True,
                before={"plan": before.to_json(), "targets": targets},
            )
            await r.ready()
            for name in names:
                assert (await gateway.end(name, 5)).code in ("conflict", "stage_lost")
            given = {name: gateway.tokens[name] for name in names}
        async with r.gateway() as gateway:
            for name, prompt in names.items():
                rest = await gateway.generate(
                    name, prompt, 400, output_ids=given[name], seed=3, temperature=0.8
                )
                assert rest == whole[name]
        step = (await r.workers[0].stats())["step"]
        expected = sum((len(p) + len(given[n]) - 1) // 16 * 16 for n, p in names.items())
        assert expected - 32 <= step["hit_tokens"] <= expected, "whole blocks, but for what was under way"
        known = sum(len(p) + len(given[n]) - 1 for n, p in names.items())
        assert step["replayed"] == known - step["hit_tokens"]
        await r.idle()


@pytest.mark.slow
async def test_where_a_stage_could_not_take_it_over_all_is_computed_again(
    model: Path, tmp_path: Path
) -> None:
    plan = lambda m, n: make_plan(m, n, 2, cuts=[4], context=2048, dtype="int8")  # noqa: E731
    async with ring(model, tmp_path, plan) as r:
        before, targets = r.plan, [["127.0.0.1", r.ports[0]], ["127.0.0.1", 1]]
        async with r.gateway() as gateway:
            whole = await gateway.generate("whole", PROMPTS[2], 300)
            await gateway.submit("a", PROMPTS[2], 300)
            await gateway.given("a", 100)
            after = make_plan(before.manifest, 6, 2, cuts=[5], context=2048, dtype="int8")
            await r.load(
                dataclasses.replace(after, epoch=Epoch(2, "n0")),
                beside=True,
                before={"plan": before.to_json(), "targets": targets},
            )
            await r.ready()
            await gateway.end("a", 5)
            given = gateway.tokens["a"]
        async with r.gateway() as gateway:
            assert await gateway.generate("a", PROMPTS[2], 300, output_ids=given) == whole
        step = (await r.workers[0].stats())["step"]
        assert step["hit_tokens"] == 0 and step["replayed"] == len(PROMPTS[2]) + len(given) - 1
