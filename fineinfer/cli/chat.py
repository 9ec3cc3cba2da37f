"""``fineinfer chat``: talk to a served model; ``/ab`` puts one question to the base model and an adapter."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineinfer.cli.client import CliError, UrlOption, connect, explain
from fineinfer.cli.fine_tuning import first_model

if TYPE_CHECKING:
    from openai import OpenAI

_SETTABLE: dict[str, Callable[[str], float]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
}
_HELP = """\
/help              this text
/model NAME        talk to another model or adapter
/models            list the served models
/system TEXT       set the system prompt (without TEXT: remove it)
/set KEY VALUE     one of temperature, top_p, max_tokens, seed, presence_penalty, frequency_penalty
/clear             forget the conversation
/retry             answer the last message again
/ab A B [MESSAGE]  put MESSAGE (else your last one) to both models; the conversation stays as it is
/stats             show or hide time to first token and tokens per second
/bye               leave (also Ctrl-D); Ctrl-C stops an answer"""


def chat(
    quick: Annotated[str | None, typer.Option("-q", "--quick", metavar="MESSAGE", help="Ask once and leave.")] = None,
    system_prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model or adapter (default: the base)")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show TTFT and tokens per second.")] = False,
    url: UrlOption = None,
) -> None:
    """Chat with a served model; type /help inside."""
    with connect(url) as client:
        session = ChatSession(client, model or first_model(client), system=system_prompt, show_stats=stats)
        given = {"temperature": temperature, "max_tokens": max_tokens}
        session.options = {name: value for name, value in given.items() if value is not None}
        if quick is not None:
            session.ask(quick)
        else:
            _converse(session)


@dataclass
class ChatSession:
    """One conversation and its settings.

    Args:
        client: Connected OpenAI client.
        model: Model that answers.
        system: System prompt, or None for the model's own.
        show_stats: Print figures after each answer.
    """

    client: OpenAI
    model: str
    system: str | None = None
    show_stats: bool = False
    options: dict[str, float] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    last_question: str | None = None

    def ask(self, text: str) -> None:
        """Stream the answer to a message and keep both; a message without any answer is kept only for ``/retry``."""
        self.last_question = text
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            self.stream([*self.messages, question], self.model, pieces)
        finally:  # what came before an error or Ctrl-C was seen by the user, so it belongs to the conversation
            if pieces:
                self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]

    def stream(self, messages: list[dict[str, str]], model: str, pieces: list[str]) -> None:
        """Print one answer as it comes and append its parts to ``pieces``."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {"model": model, "messages": system + messages, "stream": True, **self.options}
        start_s = time.monotonic()
        first_s: float | None = None
        num_tokens: int | None = None
        with self.client.chat.completions.create(**body, stream_options={"include_usage": True}) as chunks:
            for chunk in chunks:
                num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    first_s = first_s or time.monotonic()
                    pieces.append(piece)
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        typer.echo()
        if self.show_stats and first_s is not None:
            _print_stats(start_s, first_s, num_tokens)

    def command(self, line: str) -> bool:
        """Run a slash command; False leaves the chat."""
        name, _, rest = line[1:].partition(" ")
        if name in ("bye", "exit", "quit"):
            return False
        action = getattr(self, f"_do_{name}", None) if name.isidentifier() else None
        if action is None:
            raise CliError(f"unknown command /{name}; /help lists them")
        action(rest.strip())
        return True

    def _do_help(self, rest: str) -> None:
        typer.echo(_HELP)

    def _do_model(self, rest: str) -> None:
        if rest:
            self.client.models.retrieve(rest)  # an unknown name fails here, not at the next message
            self.model = rest
        typer.echo(f"model: {self.model}")

    def _do_models(self, rest: str) -> None:
        for item in self.client.models.list():
            typer.echo(("* " if item.id == self.model else "  ") + item.id)

    def _do_system(self, rest: str) -> None:
        self.system = rest or None
        typer.echo("system prompt set" if rest else "system prompt removed")

    def _do_set(self, rest: str) -> None:
        name, _, raw = rest.replace("=", " ").partition(" ")
        if name not in _SETTABLE:
            raise CliError(f"/set knows {', '.join(_SETTABLE)}")
        try:
            self.options[name] = _SETTABLE[name](raw.strip())
        except ValueError:
            raise CliError(f"/set {name}: '{raw.strip()}' is not a number") from None
        typer.echo(f"{name} = {self.options[name]}")

    def _do_clear(self, rest: str) -> None:
        self.messages.clear()
        typer.echo("conversation cleared")

    def _do_retry(self, rest: str) -> None:
        if self.last_question is None:
            raise CliError("nothing was asked yet")
        if self.messages and self.messages[-2]["content"] == self.last_question:
            del self.messages[-2:]
        self.ask(self.last_question)

    def _do_ab(self, rest: str) -> None:
        first, second, message = [*rest.split(maxsplit=2), "", "", ""][:3]
        if not second:
            raise CliError("/ab needs two model names")
        if message:
            messages = [*self.messages, {"role": "user", "content": message}]
        elif self.messages:
            messages = self.messages[:-1]  # up to the last question
        else:
            raise CliError("nothing was asked yet; /ab A B MESSAGE asks at once")
        for model in (first, second):
            typer.secho(f"[{model}]", bold=True)
            self.stream(messages, model, [])

    def _do_stats(self, rest: str) -> None:
        self.show_stats = not self.show_stats
        typer.echo(f"stats {'on' if self.show_stats else 'off'}")


def _print_stats(start_s: float, first_s: float, num_tokens: int | None) -> None:
    ttft_ms = (first_s - start_s) * 1000
    decode_s = time.monotonic() - first_s
    # the first token belongs to the TTFT, so n - 1 tokens share the time after it
    rate = f", {(num_tokens - 1) / decode_s:.1f} tok/s" if num_tokens and num_tokens > 1 and decode_s > 0 else ""
    count = f", {num_tokens} tokens" if num_tokens else ""
    typer.echo(f"[TTFT {ttft_ms:.0f} ms{count}{rate}]", err=True)


def _converse(session: ChatSession) -> None:
    import openai

    interactive = sys.stdin.isatty()
    if interactive:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() line editing and history)
        typer.echo(f"Talking to {session.model}. /help lists the commands, Ctrl-D leaves.")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        try:
            if line.startswith("/"):
                if not session.command(line):
                    return
            elif line:
                session.ask(line)
        except KeyboardInterrupt:
            typer.echo()
            if not interactive:
                raise
        except CliError as error:
            _report(error, interactive)
        except openai.APIError as error:
            _report(explain(error), interactive)


def _report(error: CliError, interactive: bool) -> None:
    # a person reads on and tries again; a script must not go on as if nothing had happened
    if not interactive:
        raise error
    typer.secho(str(error), fg="red", err=True)
