"""The report at the end of a run: speed, and what the cache did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgekv import layout, machine
from edgekv.budget import format_bytes
from edgekv.generation.generate import FINISH_REASONS, Answer
from edgekv.generation.session import Session


def rate(count: int, seconds: float) -> float | None:
    """Per second, None when nothing was measured."""
    return count / seconds if count and seconds > 0 else None


@dataclass(frozen=True)
class IndexReport:
    """What a compressed cache cost. Bytes are of all layers; those of a step were counted by the kernels while decoding.

    token_bytes         index and record of one compressed token, positions and sinks left out; token_bytes_fp16: as it would be in half precision
    retrieve            as it was asked for
    tokens_retrieved    by a generated token now, in the layer that holds most, of tokens_compressed
    *_bytes_per_step    None when no answer came to its end by decoding
    """

    token_bytes: int
    token_bytes_fp16: int
    retrieve: str
    tokens_retrieved: int
    tokens_compressed: int
    index_bytes_per_step: float | None
    payload_bytes_per_step: float | None

    @classmethod
    def of(cls, session: Session, answers: list[Answer]) -> IndexReport:
        layers, now = session.engine.bundle.compressed, session.engine.reads()
        parts = [answer.reads for answer in answers if answer.reads is not None]
        steps = sum(part.steps for part in parts)
        return cls(
            token_bytes=sum(p["kv_heads"] * layout.token_bytes(p) for p in layers),
            token_bytes_fp16=sum(p["kv_heads"] * 2 * (p["key_dim"] + p["value_dim"]) for p in layers),
            retrieve=str(session.engine.retrieval),
            tokens_retrieved=now.retrieved,
            tokens_compressed=now.compressed,
            index_bytes_per_step=sum(part.index_bytes for part in parts) / steps if steps else None,
            payload_bytes_per_step=sum(part.payload_bytes for part in parts) / steps if steps else None,
        )

    def line(self) -> str:
        change = self.token_bytes / self.token_bytes_fp16 - 1
        text = f"index     {self.token_bytes} bytes per compressed token (fp16: {self.token_bytes_fp16}, {change:+.0%})"
        text += f", {self.tokens_retrieved} of {self.tokens_compressed} retrieved"
        if self.index_bytes_per_step is not None:
            text += f"; a step read {format_bytes(round(self.index_bytes_per_step))} of codes and {format_bytes(round(self.payload_bytes_per_step))} of records"
        return text


@dataclass(frozen=True)
class Report:
    """Figures of one run, all measured. Bytes, seconds, tokens; rates in tokens per second, None without tokens.

    prompt_tokens      tokens of the prompts; prompt_tokens_computed of them were not in the cache already
    decode             from after the prompt to the last token, sampling and detokenising included, the consumer's time left out
    compaction         time spent at boundaries, part of prefill and decode
    kv_bytes_allocated the arena of all layers; kv_bytes_used of it hold keys and values of kept tokens
    index              of a compressed cache, else None
    tokens_kept        in the layer that keeps most; tokens_evicted left that layer
    """

    prompt_tokens: int
    prompt_tokens_computed: int
    generated_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float | None
    decode_seconds: float
    decode_tokens_per_second: float | None
    compaction_seconds: float
    kv_bytes_allocated: int
    kv_bytes_used: int
    tokens_kept: int
    tokens_evicted: int
    position: int
    peak_rss_bytes: int
    threads: int
    index: IndexReport | None = None

    @classmethod
    def of(cls, session: Session, answers: list[Answer]) -> Report:
        """Sums over the answers of one session, with the cache as it is now."""
        cache = session.engine.occupancy(session.position)
        fed, generated = sum(a.fed for a in answers), sum(len(a.tokens) for a in answers)
        prefill, decode = sum(a.prefill_seconds for a in answers), sum(a.decode_seconds for a in answers)
        return cls(
            prompt_tokens=sum(a.prompt_tokens for a in answers),
            prompt_tokens_computed=fed,
            generated_tokens=generated,
            prefill_seconds=prefill,
            prefill_tokens_per_second=rate(fed, prefill),
            decode_seconds=decode,
            decode_tokens_per_second=rate(generated, decode),
            compaction_seconds=sum(a.compaction_seconds for a in answers),
            kv_bytes_allocated=cache.allocated,
            kv_bytes_used=cache.used,
            tokens_kept=cache.kept,
            tokens_evicted=cache.evicted,
            position=session.position,
            peak_rss_bytes=machine.peak_rss(),
            threads=session.engine.threads,
            index=IndexReport.of(session, answers) if session.engine.retrieval is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        shown = {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}
        if self.index is None:
            del shown["index"]
        return shown

    def lines(self, finish_reason: str) -> list[str]:
        """The report for a person, one fact per line."""
        speed = "{:.1f} tokens/s".format
        prefill = f", {speed(self.prefill_tokens_per_second)}" if self.prefill_tokens_per_second else ""
        decode = f", {speed(self.decode_tokens_per_second)}" if self.decode_tokens_per_second else ""
        reused = self.prompt_tokens - self.prompt_tokens_computed
        return [
            f"prefill   {self.prompt_tokens_computed} tokens in {self.prefill_seconds:.2f} s{prefill}"
            + (f" ({reused} more were in the cache already)" if reused > 0 else ""),
            f"decode    {self.generated_tokens} tokens in {self.decode_seconds:.2f} s{decode}, {self.threads} threads",
            f"compact   {self.compaction_seconds:.3f} s of these at boundaries",
            f"KV cache  {mebibytes(self.kv_bytes_allocated)} allocated, {mebibytes(self.kv_bytes_used)} used",
            f"tokens    {self.tokens_kept} kept of {self.position}, {self.tokens_evicted} evicted",
            *([self.index.line()] if self.index else []),
            f"memory    {mebibytes(self.peak_rss_bytes)} peak resident",
            f"ended     {FINISH_REASONS[finish_reason]}",
        ]


def mebibytes(count: int) -> str:
    return f"{count / (1 << 20):.2f} MiB" if count < 100 << 20 else f"{count / (1 << 20):.0f} MiB"
