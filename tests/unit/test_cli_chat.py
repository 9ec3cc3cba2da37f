"""``fineinfer chat`` against a fake server: one question, a conversation, its commands and failures."""

from __future__ import annotations

import io

import pytest

from fineinfer.cli import main

from .fake_api import FakeServer, server

__all__ = ["server"]  # a fixture


def talk(monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *flags])


def test_quick_chat(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--system-prompt", "Be brief.", "--temperature", "0", "--max-tokens", "9", "--stats"]
    assert main(["chat", "-q", "Hé 🙂?", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == "base says “Hé 🙂?” 🙂\n"
    assert "TTFT" in captured.err and "5 tokens" in captured.err
    (body,) = server.bodies("POST /v1/chat/completions")
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hé 🙂?"}]
    assert body["temperature"] == 0 and body["max_tokens"] == 9 and body["stream"] is True


def test_conversation_keeps_its_history(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "one", "two", "/retry", "/clear", "three", "/bye", "never sent") == 0
    sent = [[item["content"] for item in body["messages"]] for body in server.bodies("POST /v1/chat/completions")]
    answer = "base says “one” 🙂"
    assert sent == [["one"], ["one", answer, "two"], ["one", answer, "two"], ["three"]]


def test_chat_settings(server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "/models",
        "/model my-lora",
        "/system Rhyme.",
        "/set temperature 0.5",
        "/set max_tokens=4",
        "/stats",
        "/help",
    ]
    assert talk(monkeypatch, *lines, "hi") == 0
    (body,) = server.bodies("POST /v1/chat/completions")
    assert body["model"] == "my-lora" and body["temperature"] == 0.5 and body["max_tokens"] == 4
    assert body["messages"][0] == {"role": "system", "content": "Rhyme."}
    out = capsys.readouterr().out
    assert "* base" in out and "/retry" in out and "model: my-lora" in out


def test_ab_asks_both_and_changes_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "hi", "/ab base my-lora", "/ab base my-lora what now", "next") == 0
    bodies = server.bodies("POST /v1/chat/completions")
    assert [body["model"] for body in bodies] == ["base", "base", "my-lora", "base", "my-lora", "base"]
    assert [body["messages"][-1]["content"] for body in bodies] == ["hi", "hi", "hi", "what now", "what now", "next"]
    assert len(bodies[-1]["messages"]) == 3
    assert "my-lora says “hi”" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["/nope", "/set colour red", "/set temperature hot", "/retry", "/ab base", "/ab a b"])
def test_bad_chat_commands_end_a_script(
    line: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, line) == 1
    assert capsys.readouterr().err.startswith("fineinfer: error: ")


def test_a_failed_message_can_be_retried(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # a person at a terminal: errors are shown and the session goes on
    monkeypatch.setattr("sys.stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    typed = iter(["hi", "/retry", KeyboardInterrupt(), "/bye"])

    def read(prompt: str) -> str:
        line = next(typed)
        server.chat_status = 503 if line == "hi" else 200
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert "engine is restarting (HTTP 503)" in captured.err
    assert "base says “hi” 🙂" in captured.out
