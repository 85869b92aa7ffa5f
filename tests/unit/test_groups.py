"""Grouped weights: value for value as in the file, and products equal to their definition, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from p2pshard_node.engine.embedding import QuantEmbedding
from p2pshard_node.engine.groups.features import parse_features, target_features
from p2pshard_node.engine.groups.linear import GroupLinear
from p2pshard_node.engine.groups.make import make_groups
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.groups.reference import reference_product
from p2pshard_node.engine.groups.repack import GroupRows, repack

from p2pshard.errors import UnsupportedModel
from p2pshard.models.dtypes import READABLE_GGUF
from p2pshard.models.groups import LANES, LAYOUTS, grouped_as
from tests.unit.group_files import dequantised, random_blocks

TYPES = sorted(LAYOUTS)


def rows_of(dtype: str, rows: int, columns: int, seed: int = 0) -> GroupRows:
    made = repack(dtype, random_blocks(dtype, rows, columns, seed))
    assert made is not None
    return made


def matrix_of(rows: GroupRows) -> GroupMatrix:
    count, groups, size = rows.q_RGK.shape
    matrix = GroupMatrix(rows.layout, count, groups * size)
    matrix.fill(0, rows)
    return matrix


def width(dtype: str, blocks: int) -> int:
    return blocks * READABLE_GGUF[dtype].block


def activations(tokens: int, columns: int, seed: int = 1) -> np.ndarray:
    """Of very different sizes, some groups all zero, one row all zero."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(tokens, columns // 32, 32)) * 10.0 ** random.integers(
        -3, 3, (tokens, columns // 32, 1)
    )
    x[random.random(x.shape[:2]) < 0.1] = 0
    x[tokens // 2] = 0
    return x.reshape(tokens, columns).astype(np.float32)


def product(linear: GroupLinear, x_TK: np.ndarray) -> np.ndarray:
    return linear(torch.from_numpy(x_TK)).numpy()


# -- storage --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(16, 1), (1, 1), (37, 3), (64, 5)])
def test_weights_are_those_of_the_file(dtype: str, rows: int, blocks: int) -> None:
    data = random_blocks(dtype, rows, width(dtype, blocks))
    want = dequantised(dtype, data)
    made = repack(dtype, data)
    assert made is not None
    np.testing.assert_array_equal(made.values(), want)
    order = np.random.default_rng(0).integers(0, rows, 50)
    np.testing.assert_array_equal(matrix_of(made).take(order), want[order])


def test_types_without_a_layout_are_told_apart() -> None:
    assert repack("Q2_K", random_blocks("Q2_K", 2, 256)) is None
    assert repack("F16", np.zeros((2, 64), np.uint8)) is None


@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_are_what_the_layout_says(dtype: str) -> None:
    layout = LAYOUTS[dtype]
    columns = width(dtype, 2)
    assert matrix_of(rows_of(dtype, 48, columns)).nbytes == layout.nbytes(48, columns)
    in_file = 48 * columns // READABLE_GGUF[dtype].block * READABLE_GGUF[dtype].nbytes
    # 5-bit types are kept in 6 bits, 3-bit ones in 4, and 6-bit scales of a group in 8
    most = {"Q5_0": 1.19, "Q5_1": 1.17, "Q5_K": 1.21, "Q3_K": 1.34, "Q4_K": 1.03}.get(dtype, 1.0)
    assert in_file <= layout.nbytes(48, columns) <= in_file * most


def test_a_matrix_is_filled_in_whole_panels_only() -> None:
    rows = rows_of("Q4_1", 40, 64)
    matrix = GroupMatrix(rows.layout, 40, 64)
    part = GroupRows(
        rows.layout, rows.q_RGK[:20], rows.scale_RB[:20], None if rows.low_RB is None else rows.low_RB[:20]
    )
    with pytest.raises(ValueError, match="whole panels"):
        matrix.fill(0, part)
    with pytest.raises(ValueError, match="layout Q4_0"):
        matrix.fill(0, rows_of("Q4_0", 40, 64))
    with pytest.raises(ValueError, match="whole number"):
        GroupMatrix(LAYOUTS["Q4_K"], 16, 96)


# -- products -------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_product_is_its_definition_bit_for_bit(dtype: str, wide: bool) -> None:
    for rows, blocks in ((16, 1), (37, 3)):
        weights = rows_of(dtype, rows, width(dtype, blocks), seed=rows)
        linear = GroupLinear(matrix_of(weights), None, wide=wide)
        x_TK = activations(11, linear.in_features)
        want = reference_product(weights, x_TK, wide)
        assert np.abs(want).max() > 0
        np.testing.assert_array_equal(product(linear, x_TK), want)
        # and that definition is the product, up to the rounding of activations
        exact = x_TK.astype(np.float64) @ weights.values().astype(np.float64).T
        size = np.abs(x_TK).astype(np.float64).max(axis=1, keepdims=True) * np.abs(weights.values()).sum(
            axis=1
        )
        assert (np.abs(want - exact) <= size * (2e-4 if wide else 5e-3)).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_extreme_integers_do_not_overflow(dtype: str, wide: bool) -> None:
    ones = rows_of(dtype, 16, width(dtype, 2))
    highest = (1 << LAYOUTS[dtype].bits) - 1
    ones.q_RGK[:8], ones.q_RGK[8:] = highest, 0
    linear = GroupLinear(matrix_of(ones), None, wide=wide)
    x_TK = np.ones((2, linear.in_features), np.float32)
    x_TK[1] = -1
    np.testing.assert_array_equal(product(linear, x_TK), reference_product(ones, x_TK, wide))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_is_the_same_in_every_batch(dtype: str, wide: bool) -> None:
    linear = GroupLinear(matrix_of(rows_of(dtype, 37, width(dtype, 2))), None, wide=wide)
    x_TK = activations(33, linear.in_features)
    alone = np.concatenate([product(linear, x_TK[i : i + 1]) for i in range(33)])
    for count in range(1, 34):
        np.testing.assert_array_equal(product(linear, x_TK[:count]), alone[:count])


def test_many_rows_of_a_wide_matrix_are_those_rows_alone() -> None:
    """More activations than stay in the cache are taken in parts."""
    linear = GroupLinear(matrix_of(rows_of("Q4_K", 20, 8960)), None, wide=True)
    x_TK = activations(77, 8960)
    whole = product(linear, x_TK)
    for i in (0, 7, 8, 23, 24, 76):
        np.testing.assert_array_equal(product(linear, x_TK[i : i + 1])[0], whole[i])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_not_finite_is_not_hidden(bad: float, wide: bool) -> None:
    linear = GroupLinear(matrix_of(rows_of("Q4_1", 16, 64)), None, wide=wide)
    x_TK = activations(3, 64)
    x_TK[1, 40] = bad
    out = product(linear, x_TK)
    assert np.isnan(out[1]).all() and np.isfinite(out[[0, 2]]).all()


def test_a_module_takes_any_shape_and_adds_its_bias() -> None:
    weights = rows_of("Q8_0", 24, 64)
    bias = torch.randn(24)
    linear = GroupLinear(matrix_of(weights), bias, wide=True)
    x = torch.from_numpy(activations(6, 64)).view(2, 3, 64)
    want = reference_product(weights, x.view(6, 64).numpy(), True) + bias.numpy()
    np.testing.assert_array_equal(linear(x).view(6, 24).numpy(), want)
    np.testing.assert_array_equal(linear(x.transpose(0, 1)).transpose(0, 1).reshape(6, 24).numpy(), want)
    assert linear(x[:0]).shape == (0, 3, 24)


def test_threads_change_nothing() -> None:
    matrix = matrix_of(rows_of("Q4_0", 4000, 512))
    x_TK = activations(9, 512)
    alone = product(GroupLinear(matrix, None, wide=True), x_TK)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            np.testing.assert_array_equal(product(GroupLinear(matrix, None, wide=True), x_TK), alone)
    finally:
        torch.set_num_threads(before)


# -- embeddings -----------------------------------------------------------------------------------
def test_an_embedding_gives_the_files_rows_and_scales_as_its_module_does() -> None:
    data = random_blocks("Q6_K", 50, 256)

    class Scaled(torch.nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 16.0

    table = repack("Q6_K", data)
    assert table is not None
    embedding = QuantEmbedding(Scaled(50, 256, device="meta"), matrix_of(table), 256)
    ids = torch.tensor([[3, 49, 3], [0, 1, 17]])
    want = dequantised("Q6_K", data)[ids.numpy()] * np.float32(16)
    np.testing.assert_array_equal(embedding(ids).numpy(), want)


# -- groups of our own ----------------------------------------------------------------------------
def test_four_bits_of_our_own_are_better_than_the_plain_range() -> None:
    x = np.random.default_rng(0).normal(0, 0.02, (64, 1024)).astype(np.float32)
    made = make_groups(LAYOUTS["Q4_1"], x)
    groups = x.reshape(64, -1, 32)
    low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
    plain = np.rint((groups - low) / (high - low) * 15) / 15 * (high - low) + low
    ours, others = (np.sqrt(np.mean((v.reshape(x.shape) - x) ** 2)) for v in (made.values(), plain))
    assert ours < 0.94 * others


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 1e-7, 50000.0])
def test_groups_of_one_value_keep_it(value: float) -> None:
    x = np.full((2, 64), value, np.float32)
    for name in ("Q4_1", "Q8_0"):
        values = make_groups(LAYOUTS[name], x).values()
        np.testing.assert_allclose(values, x, rtol=5e-3, atol=1e-7)


def test_eight_bits_of_our_own_are_within_half_a_step() -> None:
    x = np.random.default_rng(0).normal(size=(16, 320)).astype(np.float32)
    made = make_groups(LAYOUTS["Q8_0"], x)
    step = np.abs(x).reshape(16, -1, 32).max(axis=2).repeat(32, axis=1) / 127
    assert (np.abs(made.values() - x) <= step * 0.56).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 70000.0])
def test_weights_that_float16_cannot_scale_are_refused(bad: float) -> None:
    x = np.zeros((2, 64), np.float32)
    x[1, 3] = bad
    for name in ("Q4_1", "Q8_0"):
        with pytest.raises(UnsupportedModel, match="int4 cannot hold"):
            make_groups(LAYOUTS[name], x)


# -- rules ----------------------------------------------------------------------------------------
def test_a_files_groups_are_kept_and_others_made() -> None:
    def name(dtype: str, columns: int, outer: bool = False, grouped: bool = False) -> str | None:
        layout = grouped_as(dtype, columns, outer=outer, grouped_file=grouped)
        return None if layout is None else layout.name

    for dtype in TYPES:
        assert name(dtype, 512, grouped=True) == name(dtype, 512, outer=True, grouped=True) == dtype
    assert name("BF16", 96) == "Q4_1" and name("BF16", 96, outer=True) == "Q8_0"
    # what a file's author left in floats, or in groups that we have no layout for
    assert name("F16", 96, grouped=True) == name("Q2_K", 256, grouped=True) == "Q8_0"
    assert name("BF16", 100) is None and name("F32", 40, outer=True) is None


def test_features_are_those_of_the_target() -> None:
    x86 = "x86_64-unknown-linux-gnu"
    server = "+avx2,+f16c,+avx512f,+avx512bw,+avx512vl"
    assert parse_features(x86, server + ",+avx512vnni").dot == "vnni512"
    assert parse_features(x86, server + ",-avx512vnni").dot == "maddubs"
    assert parse_features(x86, server).madd_lanes == 32
    assert parse_features(x86, "+avx2,+avxvnni").dot == "vnni256"
    assert parse_features(x86, "+avx2,-f16c") == parse_features(x86, "+avx2")
    assert parse_features(x86, "") == parse_features(x86, "-avx2")
    assert (parse_features(x86, "").dot, parse_features(x86, "").half) == ("madd", False)
    assert parse_features("arm64-apple-darwin", "+dotprod").dot == "sdot"
    assert parse_features("aarch64-linux-gnu", "+neon").dot == "generic"
    assert parse_features("riscv64-linux-gnu", "").dot == "generic"
    assert target_features().tile >= 2 and LANES == 16
