"""How many bytes a model's weights take: in the file, in memory, and per step, for a weight format.

The integer formats mirror export/formats.py: blocks of 32 columns with one fp32 scale and one zero point each; with 4 bits one more
column per block holds what is left of the block's offset, and embedding and output matrix have 8 bits. tests/memory/test_weights.py
holds this to bundles that the exporter writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgekv.errors import UserError
from edgekv.memory.model import Matrix, ModelShape

BLOCK = 32
TABLES = ("embedding", "positions")  # matrices of which a step looks up single rows


@dataclass(frozen=True)
class WeightFormat:
    """Average bits per weight, scales included. head: the output matrix (and the tied embedding). vectors: norms and biases."""

    name: str
    bits: float
    head_bits: float
    table_bits: float
    vector_bits: float = 16

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes of the matrices of one kind, as stored."""
        bits = {"head": self.head_bits, "embedding": self.table_bits, "positions": self.table_bits}.get(matrix.owner, self.bits)
        return round(matrix.parameters * bits / 8)

    def packed_bytes(self, matrix: Matrix) -> int:
        """The same as ONNX Runtime's CPU kernels hold them."""
        return self.matrix_bytes(matrix)

    def rate_of(self, owner: str) -> str:
        """Name of the format whose read rate applies to an owner's matrices."""
        return self.name

    def by_owner(self, shape: ModelShape) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for matrix in shape.matrices:
            sizes[matrix.owner] = sizes.get(matrix.owner, 0) + self.matrix_bytes(matrix)
        if shape.vectors:
            sizes["vectors"] = round(shape.vectors * self.vector_bits / 8)
        return sizes

    def stored_bytes(self, shape: ModelShape) -> int:
        """Bytes of all weights."""
        return sum(self.by_owner(shape).values())

    def step_bytes(self, shape: ModelShape) -> int:
        """Bytes a decode step reads: every matrix once; of a table that is only looked up, next to nothing."""
        return sum(self.streams(shape).values())

    def streams(self, shape: ModelShape) -> dict[str, int]:
        """The bytes of step_bytes by the format whose rate they are read at."""
        found: dict[str, int] = {}
        for owner, size in self.by_owner(shape).items():
            if owner not in TABLES:
                found[self.rate_of(owner)] = found.get(self.rate_of(owner), 0) + size
        return found


@dataclass(frozen=True)
class BlockFormat(WeightFormat):
    """Integer codes in blocks. code_bits: of the layers' matrices; head_code_bits: of embedding and output matrix."""

    code_bits: int = 8
    head_code_bits: int = 8

    def _blocks(self, matrix: Matrix) -> tuple[int, int]:
        """(blocks per row, bits of a code)."""
        bits = self.head_code_bits if matrix.owner in ("head", "embedding") else self.code_bits
        blocks = -(-matrix.inputs // BLOCK)
        return (blocks + -(-blocks // BLOCK) if bits == 4 else blocks), bits

    def matrix_bytes(self, matrix: Matrix) -> int:
        if matrix.owner == "positions":
            return 4 * matrix.parameters
        blocks, bits = self._blocks(matrix)
        return matrix.count * matrix.outputs * (blocks * (BLOCK * bits // 8 + 4) + -(-blocks * bits // 8))

    def packed_bytes(self, matrix: Matrix) -> int:
        """Codes, and an fp32 scale and an fp32 sum per block; zero points go into the sums."""
        blocks, bits = self._blocks(matrix)
        return matrix.count * matrix.outputs * blocks * (BLOCK * bits // 8 + 8)

    def rate_of(self, owner: str) -> str:
        return f"int{self.head_code_bits}" if owner == "head" else self.name


FORMATS: dict[str, WeightFormat] = {
    "fp32": WeightFormat("fp32", 32, 32, 32, 32),
    "fp16": WeightFormat("fp16", 16, 16, 16, 32),
    "int8": BlockFormat("int8", 9.25, 9.25, 9.25, 32, 8, 8),
    "int4": BlockFormat("int4", 5.3, 9.25, 9.25, 32, 4, 8),
}
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


def weight_format(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise UserError(f"The weight format must be one of {', '.join(FORMATS)}, not {name!r}.")
    return FORMATS[name]


def resident(stored: WeightFormat, decode_on: str) -> WeightFormat:
    """The format that matrices have in memory while running: ONNX Runtime widens fp16 to fp32 on the CPU."""
    return FORMATS["fp32"] if stored.name == "fp16" and decode_on == "cpu" else stored


def streams(shape: ModelShape, weights: WeightFormat, decode_on: str) -> Mapping[str, int]:
    """Weight bytes of a decode step by the format they are read in; of a bundle, scaled to what its files really hold."""
    held = resident(weights, decode_on).streams(shape)
    if shape.bundle is None:
        return held
    stored = weight_format(str(shape.bundle.manifest.get("weights", {}).get("format", weights.name)))
    factor = shape.bundle.weight_bytes / stored.stored_bytes(shape)
    return {name: round(size * factor) for name, size in held.items()}


def packed_extra(shape: ModelShape, weights: WeightFormat) -> int:
    """Bytes that ONNX Runtime's CPU kernels hold beyond the stored ones: matrices as they pack them, tables as they are stored.

    A tied embedding lies in memory twice, packed as output matrix and once more as table.
    """
    held, extra = resident(weights, "cpu"), 0
    for matrix in shape.matrices:
        if matrix.owner not in TABLES:
            extra += held.packed_bytes(matrix) - weights.matrix_bytes(matrix)
        if matrix.owner == "head" and shape.tied:
            extra += weights.matrix_bytes(matrix)
    return extra
