"""What the planner knows: nodes, links and a model, as measured numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LinkProfile", "ModelProfile", "NodeBudget"]


@dataclass(frozen=True)
class NodeBudget:
    """One device of one node. Sizes in bytes."""

    node: str
    """The node's id."""
    name: str
    """For people, and for pins and exclusions."""
    device: str = "cpu"
    budget_bytes: int = 0
    """All that a worker of this deployment may use here, its own base included."""
    base_bytes: int = 0
    """Peak memory of an idle worker, measured on that node."""
    free_bytes: int = 0
    """Measured now; for people. ``budget_bytes`` is what counts."""
    bandwidth_gbps: float = 0.0
    """Memory bandwidth, GB/s; 0: not measured."""
    gflops: float = 0.0
    """Matrix products; 0: not measured."""
    dtypes: tuple[str, ...] = ()
    """What its engine runs; empty: everything."""


@dataclass(frozen=True)
class LinkProfile:
    """A pair of nodes that can talk; the order of the two does not matter."""

    a: str
    b: str
    """Node ids."""
    rtt_ms: float = 0.0
    bandwidth_mbps: float = 0.0
    """0: not measured."""
    fresh: bool = True
    """Both ends saw it work just now. A plan's edge needs this."""


@dataclass(frozen=True)
class ModelProfile:
    """A model's bytes, as they will be in memory with one dtype. Built by `memory.profile_model`."""

    name: str
    """What people call it; goes into the plan."""
    manifest: str
    """Digest."""
    dtype: str
    """``float32``, ``bfloat16``, ``float16``, ``int8`` or ``int4``; never ``auto``."""
    layer_bytes: tuple[int, ...]
    """Weights of each decoder layer."""
    kv_token_bytes: tuple[int, ...]
    """Keys and values of one token, in each layer."""
    embedding_bytes: int = 0
    head_bytes: int = 0
    """Output projection and final norm, as they are on a stage without the embedding."""
    shared_saving_bytes: int = 0
    """What a stage with both embedding and head saves, because they are one tensor there."""
    common_bytes: int = 0
    """Tensors that every stage holds."""
    hidden: int = 0
    vocabulary: int = 0
    max_context: int = 1 << 20
    heads: int = 0
    """Query heads."""
    query_width: int = 0
    """Query heads times their width, of the widest layer."""
    kv_width: int = 0
    """Key plus value values of one token, of the widest layer."""
    intermediate: int = 0
    """Values between the two products of an MLP, per token and over all experts it visits."""
    compute_itemsize: int = 4
    """Bytes of a value in activations."""
    runtime_bytes: int = 0
    """A worker's fixed buffers beyond its idle base: load temporaries, frames, allocator slack."""
    layer_padding_bytes: tuple[int, ...] = ()
    """What kernels take beyond each layer's weights because they pad; counted as workspace. Empty: none."""

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    def padding_bytes(self, first: int, last: int) -> int:
        """Padding of layers ``first`` to ``last`` inclusive."""
        return sum(self.layer_padding_bytes[first : last + 1])

    def weight_bytes(self, first: int, last: int) -> int:
        """Weights of a stage with layers ``first`` to ``last`` inclusive, its embedding and head included."""
        embedding, head = first == 0, last == self.layers - 1
        total = sum(self.layer_bytes[first : last + 1]) + self.common_bytes
        total += self.embedding_bytes * embedding + self.head_bytes * head
        return total - self.shared_saving_bytes * (embedding and head)
