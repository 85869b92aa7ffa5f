"""Filling a stage's modules: only the tensors it needs, each straight into its last form."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast, runtime_checkable

import torch
from torch import nn

from p2pshard.errors import ModelCorrupt, UnsupportedModel
from p2pshard.models.groups import LANES, GroupLayout, grouped_as
from p2pshard_node.engine import compat
from p2pshard_node.engine.build import StageModules
from p2pshard_node.engine.embedding import QuantEmbedding
from p2pshard_node.engine.fused.prepare import COMPILING, prepare
from p2pshard_node.engine.groups.check import check_exact
from p2pshard_node.engine.groups.linear import GroupLinear, is_wide
from p2pshard_node.engine.groups.make import make_groups
from p2pshard_node.engine.groups.matrix import GroupMatrix
from p2pshard_node.engine.groups.repack import GroupRows
from p2pshard_node.engine.quant import Int8Linear, row_blocks, takes_two_rows
from p2pshard_node.engine.quant import check_exact as check_int8

__all__ = ["Weights", "load_weights", "weight_bytes"]

HEAD = "lm_head.weight"
#: Small linear layers that decide which expert runs: never quantised.
_ROUTERS = re.compile(r"(^|\.)(gate|router|shared_expert_gate)$")


class Rows(Protocol):
    """Rows [first, end) of one tensor."""

    def __call__(self, first: int, end: int, dtype: torch.dtype) -> torch.Tensor: ...


class Weights(Protocol):
    """A model's tensors by name, whatever the file's format."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """In `dtype`; with `rows`, only [first, end) of the first axis. Reads no more than it returns
        needs."""


@runtime_checkable
class GroupedWeights(Protocol):
    """Weights of a file that may hold groups already."""

    def layout(self, name: str, *, outer: bool) -> GroupLayout | None:
        """See `p2pshard.models.groups.grouped_as`."""

    def groups(self, name: str, first: int, end: int) -> GroupRows | None:
        """Rows [first, end) as the file has them; None unless that is in the groups `layout` says."""


def load_weights(
    modules: StageModules,
    weights: Weights,
    *,
    int8: bool = False,
    int4: bool = False,
    device: str = "cpu",
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Give every parameter of `modules` its value.

    At no time is there more than one row block of a matrix beside what stays (one stack of experts where
    they have to be joined). Raises `ModelCorrupt` when a tensor is missing or has another shape.
    """
    if (int8 or int4) and device != "cpu":
        raise UnsupportedModel(
            f"{'int8' if int8 else 'int4'} runs on processors only, not on {device}; "
            "use bfloat16 or float16 there"
        )
    _Loader(modules, weights, int8, int4, device, progress or (lambda *_: None)).run()


class _Loader:
    def __init__(
        self,
        modules: StageModules,
        weights: Weights,
        int8: bool,
        int4: bool,
        device: str,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.modules, self.weights, self.device, self.progress = modules, weights, device, progress
        self.int8, self.int4 = int8, int4
        self.model = modules.model
        self.embedding = f"{modules.model.base_model_prefix}.embed_tokens.weight"
        self.kept = compat.float32_names(modules.model, modules.dtype)
        self.wanted = {k: tuple(v.shape) for k, v in modules.model.state_dict().items()}
        self.total = sum(v.numel() for v in modules.model.state_dict().values())
        self.done = 0

    def run(self) -> None:
        plan = compat.map_names(self.model, self.weights.names(), self.modules.known)
        missing = set(self.wanted)
        shared = False
        if HEAD in self.wanted and self.modules.tied:
            # a tied head is the embedding's tensor, whether or not the file also names it
            shared = self.embedding in self.wanted
            if self.embedding in plan.direct:
                plan.direct[HEAD] = plan.direct[self.embedding]
            if shared:
                missing.discard(HEAD)
                plan.direct.pop(HEAD, None)
        for target, source in plan.direct.items():
            if target not in self.wanted:
                continue
            shape, asked = self.weights.shape(source), self.wanted[target]
            if shape != asked:
                raise ModelCorrupt(f"tensor {source} has shape {shape}, the configuration asks for {asked}")
            self._place(target, partial(self._rows, source), source=source)
            missing.discard(target)
        for fusion in plan.fused:
            if fusion.target not in self.wanted:
                continue
            made = compat.fuse(
                fusion, self.model, partial(self.weights.load, dtype=self._dtype(fusion.target))
            )
            for target in list(made):
                tensor = made.pop(target)
                shape, asked = tuple(tensor.shape), self.wanted.get(target, ())
                if shape != asked:
                    raise ModelCorrupt(
                        f"{target} was made in shape {shape}, the configuration asks for {asked}"
                    )
                self._place(target, partial(_slice, tensor), tensor)
                missing.discard(target)
        if missing:
            names = sorted(missing)
            raise ModelCorrupt(
                f"{len(names)} tensors are missing from the model's files: "
                + ", ".join(names[:5])
                + (" ..." if len(names) > 5 else "")
            )
        if shared:
            self._share()

    def _share(self) -> None:
        """Give a tied head the embedding's table."""
        embedding, head = self.modules.base.embed_tokens, self.model.lm_head
        if not isinstance(embedding, QuantEmbedding):
            head.weight = embedding.weight
        elif isinstance(embedding.table, Int8Linear):
            embedding.table.bias = head.bias
            self.model.lm_head = embedding.table
        elif isinstance(embedding.table, GroupMatrix):
            self.model.lm_head = self._linear(embedding.table, "lm_head", head.bias)

    def _rows(self, source: str, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        whole = (first, end) == (0, (self.weights.shape(source) or (1,))[0])
        return self.weights.load(source, dtype, None if whole else (first, end))

    def _dtype(self, target: str) -> torch.dtype:
        if self.int8 or self.int4:
            return torch.float32
        return torch.float32 if any(part in target for part in self.kept) else self.modules.dtype

    def _place(
        self,
        target: str,
        rows: Rows,
        made: torch.Tensor | None = None,
        source: str | None = None,
    ) -> None:
        path, _, leaf = target.rpartition(".")
        owner = self.model.get_submodule(path)
        shape, dtype = self.wanted[target], self._dtype(target)
        linear = isinstance(owner, nn.Linear) and leaf == "weight"
        matrix = linear and not _ROUTERS.search(path)
        if (self.int8 or self.int4) and (matrix or target == self.embedding):
            self._quantise(target, rows, shape, source, owner)
        else:
            # float32 products of one token run a third faster over columns; the values are the same
            by_columns = (
                dtype == torch.float32
                and self.device == "cpu"
                and len(shape) == 2
                and (linear or target == self.embedding)
            )
            if made is not None and not by_columns:
                value = made.to(device=self.device, dtype=dtype)
            else:
                value = self._fill(rows, shape, dtype, by_columns)
            if leaf in owner._buffers:
                owner._buffers[leaf] = value
            else:
                setattr(owner, leaf, nn.Parameter(value, requires_grad=False))
        size = 1
        for n in shape:
            size *= n
        self.done += size
        self._tell()

    def _tell(self) -> None:
        self.progress("loading", min(self.done, self.total), self.total)

    def _tell_compiling(self) -> None:
        self.progress(COMPILING, 0, 0)

    def _quantise(
        self, target: str, rows: Rows, shape: tuple[int, ...], source: str | None, owner: nn.Module
    ) -> None:
        """Put a quantised layer in place of `owner`, whose weight `rows` gives."""
        path, embeds = target.rpartition(".")[0], target == self.embedding
        layout = self._layout(source, target, shape[1]) if self.int4 else None
        bias = None if embeds else cast("nn.Parameter | None", owner.bias)
        made: nn.Module
        if layout is not None:
            matrix = self._matrix(layout, rows, shape, source)
            made = QuantEmbedding(owner, matrix, shape[1]) if embeds else self._linear(matrix, path, bias)
        else:
            check_int8()
            read = partial(rows, dtype=torch.float32)
            # an embedding's table may become the head's
            two_rows = takes_two_rows("lm_head" if embeds else path)
            try:
                linear = Int8Linear(read, shape[0], shape[1], bias, two_rows=two_rows)
            except ValueError as error:
                raise ModelCorrupt(f"tensor {source or target}: {error}") from error
            made = QuantEmbedding(owner, linear, shape[1]) if embeds else linear
        self._replace(path, made)

    def _linear(self, matrix: GroupMatrix, path: str, bias: object) -> GroupLinear:
        wide = is_wide(path)
        prepare(matrix.layout.name, wide=wide, alive=self._tell_compiling)
        check_exact(matrix.layout, wide)
        return GroupLinear(matrix, cast("nn.Parameter | None", bias), wide=wide)

    def _replace(self, path: str, module: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)

    def _layout(self, source: str | None, target: str, columns: int) -> GroupLayout | None:
        """What ``int4`` makes of a matrix; None: rows do not divide into groups."""
        outer = target in (HEAD, self.embedding)
        if source is not None and isinstance(self.weights, GroupedWeights):
            return self.weights.layout(source, outer=outer)
        return grouped_as("", columns, outer=outer, grouped_file=False)

    def _matrix(
        self, layout: GroupLayout, rows: Rows, shape: tuple[int, ...], source: str | None
    ) -> GroupMatrix:
        matrix = GroupMatrix(layout, shape[0], shape[1])
        for first, end in row_blocks(-(-shape[0] // LANES), shape[1] * LANES):
            first, end = first * LANES, min(end * LANES, shape[0])
            own = None
            if source is not None and isinstance(self.weights, GroupedWeights):
                own = self.weights.groups(source, first, end)
            matrix.fill(first, own or make_groups(layout, rows(first, end, torch.float32).numpy()))
        return matrix

    def _fill(
        self,
        rows: Rows,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        by_columns: bool,
    ) -> torch.Tensor:
        size = 1
        for n in shape[1:]:
            size *= n
        count = shape[0] if shape else 1
        blocks = list(row_blocks(count, size))
        if len(blocks) == 1 and not by_columns:
            return rows(0, count, dtype).to(self.device)
        if by_columns:
            columns_KN = torch.empty(shape[1], shape[0], dtype=dtype)
            for first, end in blocks:
                columns_KN[:, first:end] = rows(first, end, dtype).t()
            return columns_KN.t()
        value = torch.empty(shape, dtype=dtype, device=self.device)
        for first, end in blocks:
            value[first:end] = rows(first, end, dtype)
        return value


def _slice(tensor: torch.Tensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    return (tensor[first:end] if tensor.ndim else tensor).to(dtype)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights: each storage once, quantised matrices with their scales, no computed buffers."""
    persistent = model.state_dict(keep_vars=True).values()
    tensors: dict[int, int] = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *persistent)}
    total = sum(tensors.values()) + sum(m.nbytes for m in model.modules() if isinstance(m, Int8Linear))
    # a tied head has its embedding's table
    tables = {m.table for m in model.modules() if isinstance(m, GroupLinear | QuantEmbedding)}
    return total + sum(table.nbytes for table in tables if isinstance(table, GroupMatrix))
