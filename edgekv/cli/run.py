"""`edgekv run`: generates text from a bundle, once or in a conversation, and reports what that cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgekv.cli import INTERRUPTED, _common, _traffic
from edgekv.cli._drafting import Drafting, byte_limit
from edgekv.errors import UserError
from edgekv.retrieval import parse_retrieval


@dataclass
class Options:
    """How answers are generated and shown."""

    max_tokens: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    as_json: bool
    quiet: bool
    compare: bool


@click.command()
@_common.bundle_argument
@click.option("--prompt", "-p", help="Text to continue; with --chat, the first message.")
@click.option("--prompt-file", "-f", type=click.Path(path_type=Path), help="The same from a UTF-8 file.")
@click.option("--chat", is_flag=True, help="Hold a conversation with the model's own chat template.")
@click.option("--system", help="System message of the conversation.")
@click.option("--max-tokens", "-n", type=click.IntRange(0), default=512, show_default=True, help="Most tokens per answer; 0: no limit.")
@click.option("--temperature", type=float, help="0 is greedy. Sampling options default to the model's own, else to greedy.")
@click.option("--top-k", type=int, help="Keep the k most probable tokens; 0 is off.")
@click.option("--top-p", type=float, help="Keep the most probable tokens that sum to p; 1 is off.")
@click.option("--min-p", type=float, help="Keep tokens at least p times as probable as the best; 0 is off.")
@click.option("--repetition-penalty", type=float, help="Make tokens that occurred less probable; 1 is off.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Of the random numbers; default: a new one each time. With --draft a text comes again with a fixed --gamma only.")
@click.option("--stop", multiple=True, help="End the answer at this text; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on when the model ends its answer (for measurements).")
@click.option("--draft", help="Draft tokens for the model to verify, same text but faster: a bundle, ngram, self or self:WINDOW.")
@click.option("--gamma", type=click.IntRange(1, 16), help="Tokens per draft; default: as many as pay, none where none do.")
@click.option("--compare", is_flag=True, help="Generate without drafts first, and report the speed-up.")
@click.option("--retrieve", help="Compressed tokens that a generated token attends to: 96, 7.5% or all; default: the bundle's (--cache selfindex).")
@click.option("--rerank", type=click.IntRange(1, 64), help="Candidates per retrieved token that are ranked again by their stored keys.")
@click.option("--kv-limit", help="Refuse to start when the KV caches of model and draft take more, like 3MiB.")
@_common.threads_option
@_common.engine_option
@_common.verify_option
@_traffic.options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--quiet", "-q", is_flag=True, help="No report and no progress.")
def command(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    system: str | None,
    max_tokens: int,
    seed: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    draft: str | None,
    gamma: int | None,
    compare: bool,
    retrieve: str | None,
    rerank: int | None,
    kv_limit: str | None,
    threads: int | None,
    kind: str,
    verify: bool,
    as_json: bool,
    quiet: bool,
    traffic: str | None,
    traffic_json: Path | None,
    traffic_html: Path | None,
    device: str | None,
    **sampling: Any,
) -> None:
    """Generate text from BUNDLE.

    The prompt comes from --prompt, --prompt-file or standard input. The report goes to standard error. Ctrl-C ends an answer (exit code 130
    without --chat). With --chat, Ctrl-D or /exit ends the conversation; /reset starts a new one.
    """
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt-file exclude each other; give one of them.")
    if system is not None and not chat:
        raise UserError("--system belongs to a conversation; add --chat.")
    if draft is None and (gamma is not None or compare):
        raise UserError(f"--{'compare' if compare else 'gamma'} belongs to drafting; add --draft.")
    if compare and chat:
        raise UserError("--compare runs one prompt twice, which a conversation is not; leave out --chat.")
    limit = byte_limit(kv_limit)
    amount = parse_retrieval(retrieve) if retrieve is not None else None
    if any(not text for text in stop):
        raise UserError("--stop needs a text that is not empty.")
    interactive = sys.stdin is not None and sys.stdin.isatty()
    if prompt_file is not None:
        prompt = _common.read_text(prompt_file)
    elif prompt is None and not chat:
        if interactive:
            raise UserError("There is nothing to continue: give --prompt, --prompt-file or text on standard input, or --chat.")
        prompt = _common.read_standard_input()
    options = Options(max_tokens or None, stop, ignore_eos, as_json, quiet, compare)

    # imported late, so that a wrong option is answered at once
    from edgekv import bundle as bundles
    from edgekv import engine
    from edgekv.generation.sampling import Sampler, SamplingOptions
    from edgekv.generation.session import Session

    opened = bundles.open_bundle(bundle, verify)
    _common.check_retrieval(opened, amount, rerank)
    settings = SamplingOptions(**_sampling(opened.manifest.get("generation", {}), sampling))
    runner = _Chat if chat else _Completion
    run = runner(opened, options, prompt, system, interactive)
    drafting = Drafting(draft, gamma, opened, run.tokenizer, verify, limit)
    account = _traffic.Traffic(traffic, traffic_json, traffic_html, device)
    drafting.share_threads(threads)
    loaded = engine.load(opened, threads, kind=kind, **drafting.engine_options)
    try:
        _common.set_retrieval(loaded, amount, rerank)
        loaded = account.engine(loaded)
        session = Session(loaded)
        drafting.start(loaded)
        run.drafting, run.account = drafting, account
        run(session, Sampler(settings, loaded.vocab, seed))
    finally:
        account.close()
        drafting.close()
        loaded.close()


def _sampling(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Options of the command line over the bundle's own; a temperature given as 0 is greedy whatever the bundle says."""
    chosen = {}
    for name, value in given.items():
        default = defaults.get(name)
        if value is None and isinstance(default, int | float) and not isinstance(default, bool):
            value = int(default) if name == "top_k" else float(default)
        if value is not None:
            chosen[name] = value
    return chosen


class _Run:
    """What one completion and a conversation share."""

    def __init__(self, bundle: Any, options: Options, prompt: str | None, system: str | None, interactive: bool):
        from edgekv.generation.text import load_tokenizer

        self.bundle, self.options, self.prompt, self.system, self.interactive = bundle, options, prompt, system, interactive
        self.tokenizer = load_tokenizer(bundle)
        self.answers: list[Any] = []
        self.comparison: Any = None
        self.drafting: Any = None
        self.account: Any = None
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal of another encoding must not end the answer

    def generation_options(self) -> dict[str, Any]:
        options = self.options
        silent = options.quiet or options.as_json or not sys.stderr.isatty()
        return {
            "decoder": self.drafting.decoder,
            "max_tokens": options.max_tokens,
            "stop_strings": options.stop,
            "end_tokens": () if options.ignore_eos else self.bundle.model["eos_token_ids"],
            "progress": None if silent else _common.PrefillProgress(),
        }

    def show(self, pieces: Iterator[str]) -> None:
        for piece in pieces:
            if not self.options.as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()

    def end_line(self) -> None:
        if not self.options.as_json and self.answers and not self.answers[-1].text.endswith("\n"):
            click.echo()

    def finish(self, session: Any, sampler: Any, **more: Any) -> None:
        """Prints the report, or the JSON object."""
        from edgekv.generation.report import Report

        if not self.answers:
            return
        last, report, drafting = self.answers[-1], Report.of(session, self.answers), self.drafting.report()
        self.account.finish()
        if self.options.as_json:
            shown = {**_answer_json(last), "seed": sampler.seed, **more, "report": report.to_json()}
            if drafting:
                shown["drafting"] = drafting.to_json()
            if self.comparison:
                shown["compare"] = self.comparison.to_json()
            if traffic := self.account.to_json():
                shown["traffic"] = traffic
            click.echo(json.dumps(shown, ensure_ascii=False))
        elif not self.options.quiet:
            lines = report.lines(last.finish_reason) + (drafting.lines() if drafting else [])
            lines += [self.comparison.line()] if self.comparison else []
            lines += self.account.lines()
            click.echo("\n" + "\n".join(lines), err=True)


def _answer_json(answer: Any) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": answer.tokens,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "prompt_tokens": answer.prompt_tokens,
    }


class _Completion(_Run):
    """Continues one text."""

    def __call__(self, session: Any, sampler: Any) -> None:
        from edgekv.generation.decoders import plain
        from edgekv.generation.generate import Answer, generate
        from edgekv.generation.sampling import Sampler
        from edgekv.generation.speculation_report import Comparison

        tokens = self.tokenizer.encode(self.prompt).ids
        if not tokens and self.bundle.model["bos_token_id"] is not None:
            tokens = [self.bundle.model["bos_token_id"]]
        if not tokens:
            raise UserError("The prompt is empty; give some text to continue.")
        self.answers = [Answer()]
        with _common.Interrupts() as interrupted:
            options = self.generation_options()
            if self.options.compare:
                undrafted, twin = Answer(), Sampler(sampler.options, session.engine.vocab, sampler.seed)
                for _ in generate(session, twin, self.tokenizer, tokens, undrafted, interrupted=interrupted, **options | {"decoder": plain}):
                    pass
                session.reset()
            self.show(generate(session, sampler, self.tokenizer, tokens, self.answers[0], interrupted=interrupted, **options))
        self.end_line()
        if self.options.compare and "interrupted" not in (undrafted.finish_reason, self.answers[0].finish_reason):
            self.comparison = Comparison.of(undrafted, self.answers[0], sampler.options.greedy)
        self.finish(session, sampler)
        if self.answers[0].finish_reason == "interrupted":
            raise click.exceptions.Exit(INTERRUPTED)


class _Chat(_Run):
    """Holds a conversation: the prompt first if there is one, then lines of standard input."""

    def __init__(self, bundle: Any, options: Options, prompt: str | None, system: str | None, interactive: bool):
        from edgekv.generation.template import template_of

        super().__init__(bundle, options, prompt, system, interactive)
        template = template_of(bundle, self.tokenizer)
        if template is None:
            raise UserError(f"{bundle.folder} has no chat template; the model was not trained for conversations. Run it without --chat.")
        if interactive and options.as_json and prompt is None:
            raise UserError("--json prints one object at the end; give the messages with --prompt or on standard input.")
        self.template = template

    def messages(self) -> Iterator[str]:
        if self.prompt is not None:
            yield self.prompt
            if not self.interactive or self.options.as_json:
                return
        if self.interactive:
            import readline  # noqa: F401  gives input() line editing and history

            while True:
                try:
                    yield input("> ")
                except (EOFError, KeyboardInterrupt):
                    click.echo()
                    return
        yield from _common.read_standard_input().splitlines()

    def __call__(self, session: Any, sampler: Any) -> None:
        from edgekv.generation.conversation import Conversation
        from edgekv.generation.generate import Answer

        talk = Conversation(session, sampler, self.tokenizer, self.template, self.system)
        turns = []
        for message in self.messages():
            if message.strip() in ("/exit", "/quit"):
                break
            if message.strip() == "/reset":
                talk.clear()
                continue
            if not message.strip():
                continue
            answer, forgotten = Answer(), talk.forgotten
            try:
                with _common.Interrupts() as interrupted:
                    options = self.generation_options()
                    self.answers.append(answer)
                    self.show(talk.ask(message, answer, interrupted=interrupted, **options))
            except UserError as error:
                self.answers.remove(answer)
                if not self.interactive:
                    raise
                click.echo(f"edgekv: {error}", err=True)
                continue
            self.end_line()
            turns.append(_answer_json(answer))
            self.remark(answer, talk.forgotten - forgotten, session)
        self.finish(session, sampler, turns=turns, forgotten_messages=talk.forgotten)

    def remark(self, answer: Any, forgotten: int, session: Any) -> None:
        """Says what the person could not see in the answer itself."""
        if self.options.as_json or self.options.quiet:
            return
        capacity = session.engine.capacity
        if forgotten:
            click.echo(f"(the oldest {forgotten} messages were forgotten: this bundle holds {capacity} tokens)", err=True)
        if answer.finish_reason == "capacity":
            click.echo(f"(the answer ends here because the cache of {capacity} tokens is full and evicts nothing)", err=True)
        if answer.finish_reason == "interrupted":
            click.echo("(interrupted)", err=True)
