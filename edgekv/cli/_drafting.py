"""What `edgekv run` does for --draft: check it before anything is loaded, start it, report it."""

from __future__ import annotations

from typing import Any

from edgekv.errors import UserError


def byte_limit(text: str | None) -> int | None:
    """The bytes of --kv-limit; raises UserError."""
    if text is None:
        return None
    from edgekv.budget import parse_budget

    try:
        limit = parse_budget(text).bytes
    except UserError:
        limit = None
    if limit is None:
        raise UserError(f"--kv-limit is a number of bytes, like 3MiB, not {text[:40]!r}.")
    return limit


class Drafting:
    """The drafter that --draft asks for, or none. Raises UserError when it does not fit the target.

    engine_options  for loading the target
    decoder         how to generate, once started
    """

    def __init__(self, spec: str | None, gamma: int | None, target: Any, tokenizer: Any, verify: bool, limit: int | None):
        from edgekv.generation.adaptive import MAX_GAMMA
        from edgekv.generation.decoders import plain
        from edgekv.generation.drafters.choose import check_caches, choose

        self.decoder: Any = plain
        self.gamma, self._target, self._drafter = gamma, target, None
        self._choice = choose(spec, target, tokenizer, verify) if spec is not None else None
        draft = self._choice.bundle if self._choice else None
        check_caches(target, draft, limit)
        self.engine_options: dict[str, Any] = {}
        if self._choice:
            self.engine_options = {"max_rows": (gamma or MAX_GAMMA) + 1, "beside": draft}

    def share_threads(self, threads: int | None) -> None:
        """One pool of threads for the target and a bundle that drafts for it; to be called before either is loaded."""
        if self._choice and self._choice.bundle:
            from edgekv.engine import pool

            pool.share(threads)

    def start(self, loaded: Any) -> None:
        """Makes the drafter for the loaded target."""
        from edgekv.generation.adaptive import AdaptiveLength, FixedLength
        from edgekv.generation.speculation import Speculation

        if self._choice:
            self._drafter = self._choice.make(loaded)
            length = AdaptiveLength(self._drafter) if self.gamma is None else FixedLength(self.gamma)
            self.decoder = Speculation(self._drafter, length, loaded.vocab)

    def report(self) -> Any:
        """What drafting did; None without a drafter."""
        from edgekv.generation.speculation_report import SpeculationReport

        return SpeculationReport.of(self.decoder, self._target.weight_bytes, self.gamma, self._choice.name) if self._drafter else None

    def close(self) -> None:
        if self._drafter:
            self._drafter.close()
