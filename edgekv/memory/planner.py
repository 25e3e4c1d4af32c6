"""Memory by owner on a device, what fits, and the longest context per policy: computed before anything is built or run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgekv import layout
from edgekv.budget import Budget, format_bytes
from edgekv.errors import UserError
from edgekv.memory.model import ModelShape
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import TABLES, WeightFormat, packed_extra
from edgekv.policy import CachePolicy, Plan, plan

MIB = 1 << 20
BUILD_FACTOR = 4  # engine builders have been seen to need 3 to 4 times the parameters in memory


@dataclass(frozen=True)
class Runtime:
    """What a runtime needs beside weights and cache.

    base: bytes of interpreter, libraries and, on GPUs, the CUDA context. basis: measured here or assumed.
    workspace: allocated over needed bytes of activations (an arena that grows by doubling). packs: whether weights are packed
    anew at load, as ONNX Runtime does on the CPU: a tied embedding then lies in memory twice, once packed as output matrix and
    once as table, and blocks of integers get a sum each beside their scale.
    """

    name: str
    base: int
    basis: str
    workspace: float = 1.0
    packs: bool = False


RUNTIMES = {
    "cpu": Runtime("ONNX Runtime on the CPU", 74 * MIB, "measured on x86-64 Linux with Python 3.11", 2.5, True),
    "gpu": Runtime("TensorRT", 600 * MIB, "assumed; no Jetson was at hand to measure it"),
}
TOKENIZER_BASE, TOKENIZER_PER_TOKEN = 6 * MIB, 600  # resident bytes of a tokenizer, measured with 49,152 and 151,936 tokens
TABLE_SHARE = 0.6  # of an embedding table that is only looked up: resident after a page of text, measured with one model
ASSUMED_IDLE = 1024 * MIB  # when a profile does not know the system's own use; always shown as an assumption


@dataclass(frozen=True)
class Line:
    """One owner of memory. basis: exact (follows from the layout), computed, measured, read (profile) or assumed."""

    owner: str
    bytes: int
    basis: str


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one model with one cache on one device; sizes in bytes, None where the device's memory is unknown."""

    lines: tuple[Line, ...]
    system: Line
    total: int | None
    build: int

    @property
    def needed(self) -> int:
        return sum(line.bytes for line in self.lines)

    @property
    def resident(self) -> int:
        """Expected resident set of the process: of a table that is looked up in the file, the part that text touches."""
        return self.needed - round((1 - TABLE_SHARE) * self.bytes_of("embedding table"))

    @property
    def usable(self) -> int | None:
        return None if self.total is None else max(self.total - self.system.bytes, 0)

    @property
    def fits(self) -> bool | None:
        return None if self.usable is None else self.needed <= self.usable

    @property
    def largest(self) -> Line:
        """The largest single allocation; the KV arena is one, whatever its parts."""
        arena = Line("KV arena", sum(line.bytes for line in self.lines if line.owner.startswith("KV ")), "exact")
        return max([arena, *self.lines], key=lambda line: line.bytes)

    def bytes_of(self, *owners: str) -> int:
        return sum(line.bytes for line in self.lines if line.owner in owners)


def arena_by_owner(layers: Iterable[Mapping]) -> dict[str, int]:
    """Bytes of all states by owner (layout.OWNERS), exact."""
    owners: Counter[str] = Counter()
    for params in layers:
        owners.update(layout.bytes_by_owner(params))
    return {f"KV {owner}": owners[owner] for owner in layout.OWNERS if owners[owner]}


def workspace_bytes(shape: ModelShape, chunk: int, depth: int) -> int:
    """Activations and working memory of one prefill block of `chunk` rows over `depth` cached tokens.

    The widest moment of a layer: residual and normalised rows, both MLP branches and their product; beside it queries, keys,
    values and the attention op's packed queries and partial results (two per row). Single precision.
    """
    g = max(shape.layers, key=lambda layer: layer.q_heads * layer.given_dim)
    queries = g.q_heads * g.given_dim
    partial = 2 * g.q_heads * ((g.value_dim + 15) // 16 * 16 + 32)
    mlp = 2 * shape.hidden + 3 * shape.intermediate
    attention = 2 * shape.hidden + 3 * queries + 2 * g.kv_heads * g.given_dim + partial
    return 4 * chunk * max(mlp, attention)


def memory_plan(
    shape: ModelShape, weights: WeightFormat, cache: Plan, profile: Profile, chunk: int = 256, logit_rows: int = 1
) -> MemoryPlan:
    """Memory of a run, by owner, against what the device has."""
    runtime = RUNTIMES[profile.data["decode_on"]]
    stored = shape.bundle.weight_bytes if shape.bundle else weights.stored_bytes(shape)
    chunk = min(chunk, cache.boundary)
    tables = sum(size for owner, size in weights.by_owner(shape).items() if owner in TABLES)
    lines = [
        Line("weights", stored - tables, "size of the bundle's files" if shape.bundle else f"computed for {weights.name}"),
        Line("embedding table", tables, "read from the file as needed" if runtime.packs else f"computed for {weights.name}"),
        Line("weights, packed copies", packed_extra(shape, weights) if runtime.packs else 0, f"computed for {runtime.name}"),
        *(Line(owner, size, "exact") for owner, size in arena_by_owner(cache.layers).items()),
        Line("workspace", round(runtime.workspace * workspace_bytes(shape, chunk, cache.capacity)), f"computed for blocks of {chunk} tokens"),
        Line("logits", 4 * shape.vocab * logit_rows, "exact"),
        Line("tokenizer", TOKENIZER_BASE + TOKENIZER_PER_TOKEN * shape.vocab, f"computed for {shape.vocab} tokens"),
        Line("runtime", runtime.base, f"{runtime.name}, {runtime.basis}"),
    ]
    lines = [line for line in lines if line.bytes]
    idle = profile.figure("memory.idle_use")
    if idle is not None and idle.value is not None:
        system = Line("system", int(idle.value * MIB), idle.source)
    else:
        system = Line("system", ASSUMED_IDLE, "assumed: the profile does not know it")
    return MemoryPlan(tuple(lines), system, profile.total_bytes, BUILD_FACTOR * stored)


def refuse_if_too_large(memory: MemoryPlan, shape: ModelShape, profile: Profile, weights: WeightFormat, others: Mapping[str, WeightFormat]) -> None:
    """UserError when the plan does not fit, naming what is too large and what would fit."""
    if memory.fits is not False:
        return
    need, have = format_bytes(memory.needed), format_bytes(memory.usable)
    cache = sum(line.bytes for line in memory.lines if line.owner.startswith("KV "))
    rest = memory.needed - cache - memory.bytes_of("weights", "weights, packed copies", "embedding table")
    raise UserError(f"{shape.name} needs {need} and {profile.name} has {have} usable: {_what_would_fit(memory, shape, weights, others, cache, rest, profile.data['decode_on'])}")


def _what_would_fit(memory, shape, weights, others, cache, rest, decode_on) -> str:
    room = (memory.usable - rest - memory.bytes_of("weights", "weights, packed copies", "embedding table")) * 99 // 100 // MIB  # whole MiB, a little below what is left
    if room > 0 and cache > room * MIB:
        return f"with {weights.name} weights a KV budget of up to {room}MiB fits (asked: {format_bytes(cache)})."
    smaller = sorted((f for f in others.values() if f.bits < weights.bits), key=lambda f: -f.bits)
    for candidate in smaller if not shape.bundle else []:
        room = memory.usable - rest - candidate.stored_bytes(shape) - (packed_extra(shape, candidate) if RUNTIMES[decode_on].packs else 0)
        room = room * 99 // 100 // MIB
        if room > 0:
            budget = "" if cache <= room * MIB else f" with a KV budget of up to {room}MiB"
            return f"{candidate.name} weights{budget} fit; use --weights {candidate.name}."
    total = memory.needed + memory.system.bytes
    return f"even its weights leave no room; it takes a device with at least {format_bytes(total)}, or a smaller model."


def longest_context(
    policy: CachePolicy, shape: ModelShape, room: int, limit: int | None = None
) -> tuple[int, Plan | None]:
    """Longest text, in tokens, that a policy allows in an arena of `room` bytes, with its plan; (0, None) when nothing fits.

    Full caches end where their slots end; window and heavy caches hold what fits and the text may go on to the model's context.
    """
    context = limit or shape.context
    if policy.keep != "full":
        try:
            made = plan(policy, shape.layers, Budget(bytes=room), context)
        except UserError:
            return 0, None
        return context, made
    low, high, best = 0, context, None
    while low < high:
        middle = (low + high + 1) // 2
        try:
            made = plan(policy, shape.layers, None, middle)
        except UserError:  # keys of a size that cannot be compressed
            return 0, None
        if made.arena_bytes <= room:
            low, best = middle, made
        else:
            high = middle - 1
    return low, best


SELFINDEX = "full, selfindex"


def policies(profile: Profile, element: str = "fp16") -> Sequence[tuple[str, CachePolicy]]:
    """The caches that are compared side by side: every keep rule, and where there are kernels for it every token compressed."""
    dense = [(keep, CachePolicy(keep=keep, element=element)) for keep in layout.KEEPS]
    packed = [(SELFINDEX, CachePolicy(element=element, format="selfindex"))] if compresses(profile) else []
    return [dense[0], *packed, *dense[1:]]


def compresses(profile: Profile) -> bool:
    """Whether a compressed cache is worth proposing: its kernels on GPUs have not been timed yet."""
    return profile.data["decode_on"] == "cpu"
