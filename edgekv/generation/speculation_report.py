"""What speculation did, in figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from edgekv.generation.generate import Answer
from edgekv.generation.report import rate
from edgekv.generation.speculation import Speculation


@dataclass(frozen=True)
class SpeculationReport:
    """Figures of one run, all measured or counted; None where nothing was drafted. Bytes and seconds.

    drafter                  as it was asked for: ngram, self, or the folder of a bundle
    failure                  why it broke down, None if it did not; from then on decoding was plain
    gamma                    fixed length of drafts, None when chosen while running
    target_steps             steps of the target after the prompt; plain decoding takes one per token
    tokens_per_target_step   emitted tokens of one step, all steps counted
    drafting_steps           steps with a draft; the others were plain, because nothing was proposed or it would not have paid
    drafted_tokens           proposed; accepted_tokens of them stand
    acceptance_rate          share of judged tokens (all up to the first rejected one of each draft) that stand
    reading_seconds          the draft's time with the text, beside drafting
    draft, verify, sampling  seconds of decoding; compaction is reported for the whole run
    target_weight_bytes_per_token, draft_weight_bytes_per_token
                             weights read in decoding, by emitted token; plain decoding reads plain_weight_bytes_per_token
    weight_traffic_cut       plain target bytes / target bytes
    draft_kv_bytes           cache of the draft, beside the target's
    """

    drafter: str
    failure: str | None
    gamma: int | None
    target_steps: int
    tokens_per_target_step: float | None
    drafting_steps: int
    drafted_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    reading_seconds: float
    draft_seconds: float
    verify_seconds: float
    sampling_seconds: float
    target_weight_bytes_per_token: float | None
    draft_weight_bytes_per_token: float | None
    plain_weight_bytes_per_token: int
    weight_traffic_cut: float | None
    draft_kv_bytes: int

    @classmethod
    def of(cls, speculation: Speculation, weight_bytes: int, gamma: int | None, name: str | None = None) -> SpeculationReport:
        """weight_bytes of the target: those that one step reads; name of the drafter, if not its kind's."""
        tally, drafter = speculation.tally, speculation.drafter
        own = drafter.name == "self"  # drafting with the target's weights reads the target's weights
        read = weight_bytes * tally.steps + (drafter.weight_bytes * tally.draft_steps if own else 0)
        per_token = _ratio(read, tally.emitted)
        return cls(
            drafter=name or drafter.name,
            failure=drafter.failure,
            gamma=gamma,
            target_steps=tally.steps,
            tokens_per_target_step=_ratio(tally.emitted, tally.steps),
            drafting_steps=tally.steps - tally.lengths[0],
            drafted_tokens=tally.drafted,
            accepted_tokens=tally.accepted,
            acceptance_rate=_ratio(tally.accepted, tally.tried),
            reading_seconds=tally.reading_seconds,
            draft_seconds=tally.draft_seconds,
            verify_seconds=tally.verify_seconds,
            sampling_seconds=tally.sampling_seconds,
            target_weight_bytes_per_token=per_token,
            draft_weight_bytes_per_token=None if own else _ratio(drafter.weight_bytes * tally.draft_steps, tally.emitted),
            plain_weight_bytes_per_token=weight_bytes,
            weight_traffic_cut=_ratio(weight_bytes, per_token) if per_token else None,
            draft_kv_bytes=drafter.arena_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def lines(self) -> list[str]:
        """The report for a person, one fact per line."""
        if not self.target_steps:
            return [f"draft     {self.drafter}: nothing was generated"]
        length = "adaptive length" if self.gamma is None else f"length {self.gamma}"
        rate = f", {self.acceptance_rate:.0%} of those judged" if self.acceptance_rate is not None else ""
        broken = [f"          broke down ({self.failure}); the target went on alone"] if self.failure else []
        return [
            f"draft     {self.drafter}, {length}: {self.drafted_tokens} tokens drafted, {self.accepted_tokens} accepted{rate}",
            *broken,
            f"steps     {self.target_steps} of the target, {self.tokens_per_target_step:.2f} tokens each; "
            f"{self.drafting_steps} with a draft, {self.target_steps - self.drafting_steps} plain",
            f"time      draft {self.draft_seconds:.2f} s, verify {self.verify_seconds:.2f} s, sampling {self.sampling_seconds:.2f} s"
            + (f"; reading the text {self.reading_seconds:.2f} s" if self.reading_seconds >= 0.005 else ""),
            f"weights   {self.target_weight_bytes_per_token / 1e6:.1f} MB of the target read per token, "
            f"{self.plain_weight_bytes_per_token / 1e6:.1f} MB without drafts ({self.weight_traffic_cut:.2f}x)",
        ]


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None



@dataclass(frozen=True)
class Comparison:
    """The same prompt without drafts and with them: decoding speed in tokens per second, None without tokens.

    same_tokens  whether both texts are equal; expected of greedy decoding, where only rounding can make them differ
    """

    plain_decode_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    speedup: float | None
    same_tokens: bool
    greedy: bool

    @classmethod
    def of(cls, plain: Answer, drafted: Answer, greedy: bool) -> Comparison:
        before, after = (rate(len(answer.tokens), answer.decode_seconds) for answer in (plain, drafted))
        return cls(before, after, after / before if before and after else None, plain.tokens == drafted.tokens, greedy)

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def line(self) -> str:
        if not self.speedup:
            return "compare   nothing was generated"
        text = f"compare   {self.plain_decode_tokens_per_second:.1f} tokens/s without drafts, {self.decode_tokens_per_second:.1f} with: "
        text += f"{self.speedup:.2f}x"
        if not self.greedy:
            return text
        return text + (", same text" if self.same_tokens else ", another text: steps of other sizes round differently")
