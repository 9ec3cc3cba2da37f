"""GGUF conversion: once, whole or not at all, and equal to the file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fineinfer.model import gguf as gguf_module
from fineinfer.model.errors import ModelLoadError, UnsupportedModelError
from fineinfer.model.gguf import EMBEDDED_NAME, converted_gguf, embedded_gguf
from fineinfer.model.loader import read_spec
from fineinfer.model.resolve import resolve_model_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINEINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def test_tensors_equal_the_file(embedded_model) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    names = {
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }
    checked = 0
    with safe_open(embedded_model / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
        for tensor in GGUFReader(embedded_gguf()).tensors:
            if tensor.name in names:
                expected = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
                assert torch.equal(file.get_tensor(names[tensor.name]), expected)
                checked += 1
    assert checked == len(names)


def test_tokenizer_template_and_end_token_are_kept(embedded_model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hé 🙂"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHé 🙂<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("Hé 🙂 漢字")) == "Hé 🙂 漢字"
    assert read_spec(embedded_model)[1].eos_token_ids == (2,)
    assert resolve_model_path(None) == embedded_model
    assert resolve_model_path(embedded_gguf()) == embedded_model
    assert embedded_model.name.startswith(EMBEDDED_NAME)


def test_many_at_once_convert_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    calls: list[Path] = []

    def convert(gguf: Path, target: Path) -> None:
        calls.append(target)
        time.sleep(0.2)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(gguf_module, "_convert_in_child", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(converted_gguf(source))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert set(found) == {found[0]} and len(found) == 4
    assert (found[0] / "config.json").is_file()
    source.write_bytes(b"GGUF, changed")
    assert converted_gguf(source) != found[0]


def test_a_failed_conversion_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"no model at all")
    with pytest.raises(ModelLoadError, match=r"broken\.gguf is not a GGUF file"):
        converted_gguf(source)
    source.write_bytes(b"GGUF, and then nothing of use")

    def convert(gguf: Path, target: Path) -> None:
        (target / "half").write_text("x")
        raise ModelLoadError("no")

    with monkeypatch.context() as patch:
        patch.setattr(gguf_module, "_convert_in_child", convert)
        with pytest.raises(ModelLoadError):
            converted_gguf(source)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    with pytest.raises(ModelLoadError, match=r"cannot read the GGUF file .*broken\.gguf: "):
        converted_gguf(source)  # in a real child
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_embedded_package_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "EMBEDDED_PACKAGE", "fineinfer_no_such_package")
    with pytest.raises(ModelLoadError, match="embedded model is not installed") as caught:
        embedded_gguf()
    assert not isinstance(caught.value, UnsupportedModelError)
