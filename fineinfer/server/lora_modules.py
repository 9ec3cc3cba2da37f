"""``--lora-modules``: PEFT folders that are served under a name from the start (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fineinfer.messages import AdapterRejected
from fineinfer.request import InvalidRequestError
from fineinfer.server.adapter_files import import_adapter
from fineinfer.server.errors import ApiError
from fineinfer.server.routes_adapters import check_adapter_name
from fineinfer.server.start_checks import StartError
from fineinfer.store import NameTakenError, Store


class LoraModules:
    """Puts the folders into the store before the engine starts, as new versions if their content is new.

    Args:
        store: The registry.
        base_model: Served name of the base model.
        modules: (name, folder) pairs.

    Raises:
        StartError: A name or folder cannot be used.
    """

    def __init__(self, store: Store, base_model: str, modules: Sequence[tuple[str, Path]]) -> None:
        self._store = store
        self._added: dict[tuple[str, int], int | None] = {}  # (name, step) -> the step that was current before
        self._names = {name for name, _ in modules}
        for name, path in modules:
            try:
                self._add(name, path, base_model)
            except (ApiError, InvalidRequestError, NameTakenError) as error:
                raise StartError(f"--lora-modules {name}={path}: {error}") from error

    def _add(self, name: str, path: Path, base_model: str) -> None:
        adapters = self._store.adapters
        check_adapter_name(name, base_model)
        adapters.check_free(name, replace=True)
        if not path.is_dir():
            raise InvalidRequestError("no such folder")
        version, directory = import_adapter(path, self._store.state_dir / "adapters")
        former, known = adapters.resolve(name), {one.step for one in adapters.all() if one.name == name}
        record = adapters.load(name, version, str(directory), replace=True)
        if record.step not in known:
            self._added[name, record.step] = former.step if former is not None else None

    def on_rejected(self, message: AdapterRejected) -> None:
        """The engine cannot serve an adapter: if it is one of these, undo what was added and end the server.

        Raises:
            StartError: It is.
        """
        if message.name not in self._names:
            return
        for (name, step), former in self._added.items():
            if name == message.name:
                self._store.adapters.withdraw(name, step, former)
        raise StartError(f"--lora-modules {message.name}: {message.message}")
