"""Tokenizer loading, what single tokens look like, and a small pool of threads with a tokenizer each (no torch)."""

from __future__ import annotations

import asyncio
import copy
import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerError(Exception):
    """The model folder holds no usable tokenizer."""


def forgo_torch() -> None:
    """Let transformers find no torch in this process, which never needs it, unless it is loaded already.

    A tokenizer without torch is there in 2.5 s of one core's time and 125 MB, with it in 7.3 s and 360 MB (5.24, 2.13).
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what may not be imported, as Python documents it
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # "PyTorch was not found"


def load_tokenizer(path: Path) -> Any:
    """Fast tokenizer of a local model folder or ``.gguf`` file; never asks the network, never runs the model's code.

    Raises:
        TokenizerError: There is none, or only a slow one.
    """
    from transformers import AutoTokenizer  # takes seconds: only processes that need text pay for it

    try:
        if path.suffix == ".gguf":
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, … for the same thing
        raise TokenizerError(f"no tokenizer could be loaded from {path.name}: {error}") from error
    if not tokenizer.is_fast:
        raise TokenizerError(f"{path.name} has only a slow tokenizer; a tokenizer.json is needed")
    return tokenizer


class TokenTexts:
    """What single tokens look like: text and bytes, for log-probabilities.

    Args:
        tokenizer: A fast transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in str(tokenizer._tokenizer.decoder) else None
        self._special = set(tokenizer.all_special_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 bytes of the token, which may be part of a character."""
        token = self._tokenizer._tokenizer.id_to_token(token_id)
        if token is None:  # rows of a padded embedding matrix have no token
            return b""
        if token_id not in self._special:
            if self._byte_of is not None and all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            if match := _BYTE_TOKEN.fullmatch(token):
                return bytes([int(match[1], 16)])
            if self._byte_of is None:
                return str(token.replace("▁", " ")).encode()
        return str(token).encode()

    def text_of(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character read ``bytes:\\xe2\\x80`` as at OpenAI."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@functools.cache
def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table: the printable stand-in of each byte -> the byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenizerPool:
    """Runs text work in threads, each with its own copy of the tokenizer (fast tokenizers keep mutable settings).

    Args:
        tokenizer: The tokenizer to copy; it stays usable by the event loop for decoding.
        num_threads: Threads; the Rust code runs outside the interpreter lock.
    """

    def __init__(self, tokenizer: Any, num_threads: int = 2) -> None:
        self.tokenizer = tokenizer
        self.texts = TokenTexts(tokenizer)
        self._local = threading.local()
        self._copying = threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    async def run(self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``function(tokenizer, *args, **kwargs)`` in a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(self._own(), *args, **kwargs))

    def _own(self) -> Any:
        if not hasattr(self._local, "tokenizer"):
            with self._copying:
                self._local.tokenizer = copy.deepcopy(self.tokenizer)
        return self._local.tokenizer

    def close(self) -> None:
        """Stop the threads; waits for running work."""
        self._threads.shutdown(wait=True, cancel_futures=True)


def encode_text(tokenizer: Any, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of raw text, in which the strings of special tokens mean the tokens (as completions users expect)."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return ids
