"""A tokenizer in a process that never loads torch, as in api workers and in the child that prepares data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from .conftest import make_tokenizer

CHILD = """
import json, sys
from pathlib import Path
from fineinfer.text.tokenizer import TokenTexts, forgo_torch, load_tokenizer

forgo_torch()
import fineinfer.data.prepare, fineinfer.server.app
from fineinfer.text.chat_template import render_chat

tokenizer = load_tokenizer(Path(sys.argv[1]))
ids = render_chat(tokenizer, json.loads(sys.argv[2]), True)
assert sys.modules["torch"] is None
json.dump([ids, TokenTexts(tokenizer).text_of(ids[-1])], sys.stdout)
"""
MESSAGES = [{"role": "user", "content": "the quick brown fox 你好 😀"}]


def test_a_process_without_torch_renders_the_same_chat(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    command = [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(MESSAGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    ids, last = json.loads(done.stdout)
    assert ids == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert last == tokenizer.decode(ids[-1:])


def test_where_torch_is_loaded_it_stays() -> None:
    import torch

    from fineinfer.text.tokenizer import forgo_torch

    forgo_torch()
    assert sys.modules["torch"] is torch
