"""Decoder layers of the common family on processors: compiled kernels that give the same bits on every CPU.

`recognise` says whether a module is of the family, `runner` runs a stage of it. See docs/ARCHITECTURE.md.
"""
