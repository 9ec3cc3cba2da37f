"""``fineinfer models export``: a served adapter as a PEFT folder, or merged into its base as a model of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from fineinfer.adapters.config import module_path
from fineinfer.adapters.peft_io import CONFIG_NAME, load_adapter
from fineinfer.hashing import ADAPTER_FILES, CHAT_TEMPLATE_FILE
from fineinfer.model.loader import read_spec
from fineinfer.model.merge import Delta, merge_into, write_folder
from fineinfer.model.resolve import resolve_model_path

MAX_RANK = 1 << 16  # slots set a bound when serving, nothing does here


def export_adapter(adapter: Path, target: Path) -> None:
    """Copy a PEFT folder.

    Raises:
        FileExistsError: ``target`` is not empty.
        OSError: A file is missing or cannot be copied.
    """

    def write(folder: Path) -> None:
        for name in ADAPTER_FILES:
            if name != CHAT_TEMPLATE_FILE or (adapter / name).is_file():
                shutil.copyfile(adapter / name, folder / name)

    write_folder(target, write)


def export_merged(adapter: Path, model: str | None, revision: str | None, target: Path) -> str | None:
    """Merge an adapter into its base model and write the result as a new model folder.

    Args:
        adapter: PEFT folder.
        model: Folder, ``.gguf`` file or hub id of the base; None: the embedded model.
        revision: Of a hub id.
        target: Folder to make.

    Returns:
        A warning for the user, or None.

    Raises:
        AdapterError: The adapter does not fit the model.
        ModelLoadError: The model cannot be read.
        FileExistsError: ``target`` is not empty.
    """
    base = resolve_model_path(model, revision=revision)
    _, spec = read_spec(base)
    weights = load_adapter(adapter, spec, MAX_RANK)
    deltas = {
        f"{module_path(module.layer, module.name)}.weight": Delta(weights.a(module), weights.b(module), module.scaling)
        for module in weights.layout.modules()
    }

    def fill(folder: Path) -> None:
        if (adapter / CHAT_TEMPLATE_FILE).is_file():  # what the adapter was trained in
            shutil.copyfile(adapter / CHAT_TEMPLATE_FILE, folder / CHAT_TEMPLATE_FILE)

    merge_into(base, deltas, fill, target)
    named = json.loads((adapter / CONFIG_NAME).read_text(encoding="utf-8")).get("base_model_name_or_path")
    used = base.name if model is None else Path(model).name
    if named and Path(named).name.lower() not in used.lower():
        return f"the adapter names '{named}' as its base; it was merged into '{model or base.name}'"
    return None
