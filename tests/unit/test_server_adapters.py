"""Loading, unloading and rolling back adapters over HTTP: vLLM's answers, the root as a fence, nothing half done."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fineinfer.hashing import adapter_hash
from fineinfer.server.adapter_files import AdapterFolderError, import_adapter, locate
from fineinfer.server.lora_modules import LoraModules
from fineinfer.server.start_checks import StartError
from fineinfer.store import JobRecord, JobStatus, NameTakenError, Store

from ..waiting import LIMIT_S, until
from .conftest import LiveServer

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def peft_folder(folder: Path, content: bytes = b"weights", **config: Any) -> Path:
    """What the server copies; only the engine looks into it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "rank_pattern": {"q_proj": 6}} | config))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


def job(name: str, status: JobStatus = JobStatus.RUNNING, **request: Any) -> JobRecord:
    return JobRecord(
        id="ftjob-1", version=1, status=status, name=name, created_at=5, finished_at=None, request=request,
        settings=None, dataset=None, error=None, local_key=None, trained_tokens=None, progress=None,
        num_engine_deaths=0, result_files=[],
    )  # fmt: skip


@pytest.fixture
def live(serve: Callable[..., LiveServer], tmp_path: Path) -> LiveServer:
    (tmp_path / "root").mkdir()
    server = serve(adapter_root=str(tmp_path / "root"))
    server.engine.store = Store(tmp_path / "state")
    return server


def facts(server: LiveServer, name: str) -> dict[str, Any]:
    return server.http.get(f"/v1/models/{name}").json()["fineinfer"]


def test_load_and_unload_answer_as_vllm_does(live: LiveServer, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "root/org/sql", base_model_name_or_path="another/base")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    done = live.http.post(LOAD, json={"lora_name": "sql", "lora_path": "org/sql"})
    assert (done.status_code, done.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    stored = tmp_path / "state/adapters" / adapter_hash(folder)
    assert sorted(path.name for path in stored.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
    ]  # fmt: skip
    assert facts(live, "sql") == {
        "kind": "adapter", "state": "disk", "step": 1, "version": stored.name, "rank": 6, "pinned": False,
        "job_id": None,
    }  # fmt: skip
    again = live.http.post(LOAD, json={"lora_name": "sql", "lora_path": str(folder)})
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    assert again.json()["error"]["message"] == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True."
    )
    gone = live.http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 3})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    missing = live.http.post(UNLOAD, json={"lora_name": "sql"})
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "The lora adapter 'sql' cannot be found."
    assert live.http.get("/v1/models/sql").status_code == 404


def test_in_place_makes_a_new_version_and_rollback_goes_back(live: LiveServer, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "root/a", b"one")
    first = adapter_hash(folder)
    assert live.http.post(LOAD, json={"lora_name": "a", "lora_path": "a", "pinned": True}).status_code == 200
    peft_folder(folder, b"two")  # the folder may change: what was loaded is a copy
    assert adapter_hash(tmp_path / "state/adapters" / first) == first
    inplace = {"lora_name": "a", "lora_path": "a", "load_inplace": True}
    assert live.http.post(LOAD, json=inplace).status_code == 200
    assert (facts(live, "a")["step"], facts(live, "a@1")["version"], facts(live, "a")["pinned"]) == (2, first, False)
    assert live.http.post(LOAD, json=inplace).status_code == 200
    assert facts(live, "a")["step"] == 2, "the same content is no new version"
    back = live.http.post("/v1/models/a/rollback", json={"step": 1})
    assert back.json()["fineinfer"]["version"] == first
    assert live.engine.served["a"] == first
    assert live.http.post("/v1/models/a/rollback", json={"step": 7}).status_code == 404
    assert live.http.post("/v1/models/nobody/rollback", json={"step": 1}).status_code == 404
    for name in ("base", "a@1"):
        assert live.http.post(f"/v1/models/{name}/rollback", json={"step": 1}).status_code == 400


def test_what_the_engine_refuses_leaves_nothing_behind(live: LiveServer, tmp_path: Path) -> None:
    peft_folder(tmp_path / "root/bad")
    live.engine.check = lambda message: "rank 128 is not within 1 to 64, the server's --max-lora-rank"
    refused = live.http.post(LOAD, json={"lora_name": "bad", "lora_path": "bad"})
    assert refused.status_code == 400 and "--max-lora-rank" in refused.json()["error"]["message"]
    assert list((tmp_path / "state/adapters").iterdir()) == []
    assert [model["id"] for model in live.http.get("/v1/models").json()["data"]] == ["base"]


def bad_folders(tmp_path: Path) -> dict[str, tuple[str, int, str]]:
    """lora_path -> (why, status, part of the message)."""
    root, outside = tmp_path / "root", peft_folder(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    leaky = peft_folder(root / "leaky")
    (leaky / "adapter_model.safetensors").unlink()
    (leaky / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    pipe = peft_folder(root / "pipe")
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    huge = peft_folder(root / "huge")
    (huge / "adapter_config.json").write_text(" " * (2 << 20))
    pickled = peft_folder(root / "pickled")
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    (root / "empty").mkdir()
    (root / "file").write_text("")
    return {
        "../outside": ("parent", 400, "inside"),
        str(outside): ("absolute", 400, "inside"),
        "/does/not/exist": ("no oracle", 400, "inside"),
        "link": ("link to a folder", 400, "inside"),
        "leaky": ("link to a file", 400, "leads out"),
        "pipe": ("pipe", 400, "not a plain file"),
        "huge": ("large config", 400, "too large"),
        "pickled": ("pickle", 400, "pickle"),
        "empty": ("no files", 400, "adapter_config.json is missing"),
        "file": ("a file", 404, "No adapter found for"),
        "meta-llama/some-lora": ("a hub id", 404, "No adapter found for"),
        "a\0b": ("null byte", 404, "No adapter found for"),
        "x" * 5000: ("long", 404, "No adapter found for"),
    }


def test_nothing_outside_the_root_is_read(live: LiveServer, tmp_path: Path) -> None:
    for path, (why, status, part) in bad_folders(tmp_path).items():
        answer = live.http.post(LOAD, json={"lora_name": "a", "lora_path": path})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (status, "lora_path"), why
        assert part in error["message"] and str(tmp_path) not in error["message"].replace(path, ""), why
    assert list((tmp_path / "state/adapters").iterdir()) == []
    inside = peft_folder(tmp_path / "root/blobs/x")  # as in a hub cache: links within the root
    (tmp_path / "root/snapshot").symlink_to(inside)
    assert live.http.post(LOAD, json={"lora_name": "a", "lora_path": "snapshot"}).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"lora_path": "a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "base", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "base:a", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a@3", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "../a", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "trained", "lora_path": "a", "load_inplace": True}, "lora_name"),
        ({"lora_name": "training", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "a", "lora_path": "a", "is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_name": 3, "lora_path": "a"}, "lora_name"),
    ],
)
def test_names_and_fields_are_checked_first(live: LiveServer, tmp_path: Path, body: dict[str, Any], param: str) -> None:
    peft_folder(tmp_path / "root/a")
    live.app.state.store.adapters.publish("trained", 4, "v", "/d", "ftjob-0")
    live.app.state.store.jobs.create(job("training"))
    answer = live.http.post(LOAD, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert live.http.post(UNLOAD, json={"lora_name": "trained"}).status_code == 400
    assert live.http.post(UNLOAD, json={}).json()["error"]["param"] == "lora_name"


def test_of_two_loads_of_one_name_one_wins(live: LiveServer, tmp_path: Path) -> None:
    for name in ("x", "y"):
        peft_folder(tmp_path / "root" / name, name.encode())
    statuses: list[int] = []

    def load(path: str) -> None:

        statuses.append(live.http.post(LOAD, json={"lora_name": "a", "lora_path": path}).status_code)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 400]
    assert len(list((tmp_path / "state/adapters").iterdir())) == 1


def test_one_slot_stays_for_adapters_that_are_not_pinned(live: LiveServer, tmp_path: Path) -> None:
    for index in range(3):
        peft_folder(tmp_path / f"root/{index}", str(index).encode())
    pin = [
        live.http.post(LOAD, json={"lora_name": f"a{index}", "lora_path": str(index), "pinned": True})
        for index in range(3)
    ]
    assert [answer.status_code for answer in pin] == [200, 200, 400]
    assert pin[2].json()["error"]["param"] == "pinned"


def test_the_routes_need_a_root_and_an_admin_key(serve: Callable[..., LiveServer], tmp_path: Path) -> None:
    root = peft_folder(tmp_path / "root/a").parent
    server = serve(adapter_root=str(root), api_keys=["user"], admin_api_keys=["boss"])
    server.engine.store = Store(tmp_path / "state")
    body = {"lora_name": "a", "lora_path": "a"}
    routes = [(LOAD, body), (UNLOAD, body), ("/v1/models/a/rollback", {"step": 1}), ("/v1/memory", {"budget_bytes": 1})]
    for path, sent in routes:
        assert server.http.post(path, json=sent).status_code == 401
        assert server.http.post(path, json=sent, headers={"authorization": "Bearer user"}).status_code == 403
    boss = {"authorization": "Bearer boss"}
    assert server.http.post(LOAD, json=body, headers=boss).status_code == 200
    assert server.http.get("/v1/models", headers=boss).status_code == 200


def test_without_a_root_nothing_can_be_loaded(serve: Callable[..., LiveServer]) -> None:
    answer = serve().http.post(LOAD, json={"lora_name": "a", "lora_path": "/etc"})
    assert answer.status_code == 404 and "--adapter-root" in answer.json()["error"]["message"]


def test_an_engine_that_dies_while_it_checks_is_a_503_and_nothing_is_left(live: LiveServer, tmp_path: Path) -> None:
    peft_folder(tmp_path / "root/a")
    live.engine.check = None
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(live.http.post(LOAD, json={"lora_name": "a", "lora_path": "a"}))
    )
    thread.start()
    until(lambda: live.client._checks)
    live.engine.die()
    thread.join(LIMIT_S)
    assert answers[0].status_code == 503
    assert list((tmp_path / "state/adapters").iterdir()) == []


def test_models_tell_where_weights_are_and_what_is_live(live: LiveServer) -> None:
    store = live.app.state.store
    for step in (4, 8, 9):
        store.adapters.publish("old", step, f"v{step}", f"/d{step}", None)
    store.jobs.create(job("learning", serve="live"))
    states = {m["id"]: m["fineinfer"]["state"] for m in live.http.get("/v1/models").json()["data"]}
    assert states == {
        "base": "loaded", "old": "disk", "old@4": "loaded", "old@8": "cpu", "old@9": "disk", "learning": "training",
    }  # fmt: skip
    live.script("hi")
    chat = {"model": "learning", "messages": [{"role": "user", "content": "q"}]}
    assert live.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert live.engine.added[-1].adapter == "learning"
    assert live.http.post("/v1/chat/completions", json=chat | {"model": "learning@3"}).status_code == 404
    assert live.http.delete("/v1/models/learning").status_code == 409
    assert live.http.post("/v1/models/learning/rollback", json={"step": 1}).status_code == 409
    store.adapters.publish("learning", 2, "v2", "/d", "ftjob-1")
    assert facts(live, "learning")["state"] == "training"
    moved = live.http.post("/v1/models/learning/rollback", json={"step": 2})
    assert moved.status_code == 409 and moved.headers["x-should-retry"] == "false"
    series = live.http.get("/metrics").text
    for line in ("lora_slots{", "lora_slots_used{", "adapter_loads_total{", "adapter_evictions_total{"):
        assert f"fineinfer:{line}" in series


def test_lora_modules_are_added_once_and_undone_if_the_engine_refuses(tmp_path: Path) -> None:
    store, folder = Store(tmp_path / "state"), peft_folder(tmp_path / "sql", b"one")
    modules = [("sql", folder)]
    LoraModules(store, "base", modules)
    LoraModules(store, "base", modules)
    assert [(record.name, record.step) for record in store.adapters.all()] == [("sql", 1)]
    peft_folder(folder, b"two")
    loaded = LoraModules(store, "base", modules)
    assert [(record.step, record.current) for record in store.adapters.all()] == [(1, False), (2, True)]

    class Rejected:
        name, step, message = "sql", 2, "tensor x is missing"

    with pytest.raises(StartError, match="--lora-modules sql: tensor x is missing"):
        loaded.on_rejected(Rejected)  # type: ignore[arg-type]
    assert [(record.step, record.current) for record in store.adapters.all()] == [(1, True)]
    Rejected.name = "other"
    loaded.on_rejected(Rejected)  # type: ignore[arg-type]
    store.adapters.publish("mine", 1, "v", "/d", "ftjob-9")
    for name, path in (("mine", folder), ("base", folder), ("none", tmp_path / "no"), ("empty", tmp_path)):
        with pytest.raises(StartError, match=f"--lora-modules {name}"):
            LoraModules(store, "base", [(name, path)])
    store.close()


def test_folders_that_nobody_needs_go_at_the_next_start(tmp_path: Path) -> None:
    store, adapters = Store(tmp_path / "state"), tmp_path / "state/adapters"
    kept, _ = import_adapter(peft_folder(tmp_path / "a", b"a"), adapters)
    begun, _ = import_adapter(peft_folder(tmp_path / "b", b"b"), adapters)
    import_adapter(peft_folder(tmp_path / "c", b"c"), adapters)
    (adapters / ".import-left").mkdir()
    store.adapters.load("a", kept, str(adapters / kept))
    store.jobs.create(job("j", init_from=str(adapters / begun)))
    store.remove_unknown_adapters()
    assert {path.name for path in adapters.iterdir()} == {kept, begun}
    store.close()


def test_pins_and_names_in_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / "state").adapters
    store.load("a", "v1", "/1", pinned=True)
    store.publish("a", 2, "v2", "/2", None)
    assert [record.pinned for record in store.all()] == [True, True], "the name is pinned, whatever it means"
    assert (store.num_pinned("b"), store.num_pinned("a")) == (1, 0)
    with pytest.raises(NameTakenError, match="already been loaded"):
        store.load("a", "v3", "/3")
    assert store.load("a", "v1", "/1", replace=True).step == 1
    assert [(record.step, record.current, record.pinned) for record in store.all()] == [
        (1, True, False), (2, False, False),
    ]  # fmt: skip


def test_locate_takes_relative_and_absolute_paths(tmp_path: Path) -> None:
    (tmp_path / "root/a").mkdir(parents=True)
    for path in ("a", "a/.", "./a/../a", str(tmp_path / "root/a")):
        assert locate(path, tmp_path / "root") == tmp_path / "root/a"
    with pytest.raises(AdapterFolderError, match="inside"):
        locate("a/../../root2", tmp_path / "root")
