"""Models on a node's disk: what they are, where their tensors lie, what came from other nodes. No torch."""
