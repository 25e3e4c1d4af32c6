"""How many bytes a model's weights take, stored and per step, for a weight format."""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.errors import UserError
from edgekv.memory.model import ModelShape


@dataclass(frozen=True)
class WeightFormat:
    """Average bits per weight, scales included. head: the output matrix (and the tied embedding). vectors: norms and biases."""

    name: str
    bits: float
    head_bits: float
    table_bits: float
    vector_bits: float = 16

    def stored_bytes(self, shape: ModelShape) -> int:
        """Bytes of all weights."""
        return sum(self.by_owner(shape).values())

    def step_bytes(self, shape: ModelShape) -> int:
        """Bytes a decode step reads: every matrix once; of a table that is only looked up, one row."""
        owners = self.by_owner(shape)
        return sum(size for owner, size in owners.items() if owner not in ("embedding", "positions"))

    def by_owner(self, shape: ModelShape) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for matrix in shape.matrices:
            bits = {"head": self.head_bits, "embedding": self.table_bits, "positions": self.table_bits}.get(matrix.owner, self.bits)
            sizes[matrix.owner] = sizes.get(matrix.owner, 0) + round(matrix.parameters * bits / 8)
        if shape.vectors:
            sizes["vectors"] = round(shape.vectors * self.vector_bits / 8)
        return sizes


# Blocks of 32 columns with one fp32 scale and one zero point each, as export/quantise.py stores them. Vectors stay fp32.
FORMATS = {
    "fp32": WeightFormat("fp32", 32, 32, 32, 32),
    "fp16": WeightFormat("fp16", 16, 16, 16, 32),
    "int8": WeightFormat("int8", 8 + 40 / 32, 8 + 40 / 32, 8 + 40 / 32, 32),
    "int4": WeightFormat("int4", 4 + 36 / 32, 4 + 36 / 32, 4 + 36 / 32, 32),
}
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}


def streamed_bytes(shape: ModelShape, weights: WeightFormat) -> int:
    """Weight bytes of a decode step; of a bundle, the share of its real files, whatever exactly they hold."""
    if shape.bundle is None:
        return weights.step_bytes(shape)
    stored = weight_format(str(shape.bundle.manifest.get("weights", {}).get("format", weights.name)))
    share = stored.step_bytes(shape) / stored.stored_bytes(shape)
    return round(shape.bundle.weight_bytes * share * weights.bits / stored.bits)


def resident(stored: WeightFormat, decode_on: str) -> WeightFormat:
    """The format that matrices have in memory while running: ONNX Runtime widens fp16 to fp32 on the CPU."""
    return FORMATS["fp32"] if stored.name == "fp16" and decode_on == "cpu" else stored


def weight_format(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise UserError(f"The weight format must be one of {', '.join(FORMATS)}, not {name!r}.")
    return FORMATS[name]
