"""Does a server stay right while everything happens at once? Clients, jobs, adapters and a moving memory budget.

    python benchmarks/soak.py --seconds 90
    python benchmarks/soak.py --seconds 600 --clients 32 -- --device cuda --dtype float32

Everything after ``--`` goes to `fineinfer serve` with the embedded model, in fp32, so that a greedy answer does not
depend on its neighbours. Clients ask the base model and adapters, whole and streamed, greedily and with seeds, and some
leave in mid-answer. Meanwhile jobs are created, paused, resumed and cancelled, names are rolled back, and the memory
budget moves between 70 and 100 %. Wrong is: an answer that differs from the first one of the same version to the same
question (of the base model: from the one before all began), an error that no client caused, a request that is left over
at the end, a name that then means another version than is listed. Prints counts and everything that was wrong; exits
with 1 if anything was.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from harness import write_rows
from load import Scrape, wait_quiet

from fineinfer.cli.local_server import local_server

QUESTIONS = [
    f"{verb} {noun}."
    for verb in ("Describe", "Name three kinds of", "Write a rhyme about")
    for noun in ("rivers", "bread", "lighthouses")
]
LONGEST, ROWS = 20, 60
READY_S, JOB_S, QUIET_S = 300.0, 300.0, 30.0
BUSY = {429, 503}  # said to a client that may come back
STATES = ("queued", "running", "paused", "validating_files", "pausing", "finalizing")


class Soak:
    """One run against a server.

    Args:
        http: A client with the server's address.
        rng: Of everything that is drawn.
        file_id: An uploaded training file.
    """

    def __init__(self, http: httpx.AsyncClient, rng: random.Random, file_id: str) -> None:
        self._http, self._rng, self._file_id = http, rng, file_id
        self._known: dict[tuple[str, str, int | None], list[int]] = {}  # by version, question and seed: token ids
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.base = ""
        self._num_jobs = 0

    async def begin(self) -> None:
        """Train an adapter and ask everything once while nothing else happens."""
        self.base = (await self._http.get("/v1/models")).json()["data"][0]["id"]
        job = (await self._create({"n_epochs": 1, "batch_size": 8, "save_steps": 4, "max_seq_length": 128})).json()
        deadline = time.monotonic() + JOB_S
        while (job := (await self._http.get(f"/v1/fine_tuning/jobs/{job['id']}")).json())["status"] != "succeeded":
            if job["status"] in ("failed", "cancelled") or time.monotonic() > deadline:
                raise SystemExit(f"error: the first job is {job['status']}: {job['error']}")
            await asyncio.sleep(0.5)
        for question in QUESTIONS:
            for seed in (None, 7):
                await self.ask(self.base, question, LONGEST, seed)

    async def _create(self, settings: dict[str, object]) -> httpx.Response:
        method = {"type": "supervised", "supervised": {"hyperparameters": settings}}
        body = {"model": self.base, "training_file": self._file_id, "method": method}
        self._num_jobs += 1  # a name belongs to the job that has it
        body |= {"suffix": f"soak-{self._num_jobs}"}
        return await self._http.post("/v1/fine_tuning/jobs", json=body)

    # ------------------------------------------------------------ clients

    async def client(self, until: float) -> None:
        """Ask one thing after the other."""
        while time.monotonic() < until:
            rng, what = self._rng, self._rng.random()
            question, length = rng.choice(QUESTIONS), rng.randint(1, LONGEST)
            if what < 0.2:
                await self.leave(question, rng.randint(1, 6))
            elif what < 0.7:
                await self.ask(self.base, question, length, rng.choice((None, None, 7)))
            else:
                listed = (await self._http.get("/v1/models")).json()["data"]
                name = rng.choice([model["id"] for model in listed])
                await self.ask(name, question, length, None)

    async def ask(self, model: str, question: str, length: int, seed: int | None) -> str | None:
        """Ask, and compare the answer with what this version said before; the version, None without an answer."""
        body: dict[str, Any] = {
            "model": model, "messages": [{"role": "user", "content": question}], "max_tokens": length,
            "ignore_eos": True, "return_token_ids": True, "temperature": 0.0,
        }  # fmt: skip
        if seed is not None:
            body |= {"temperature": 1.0, "seed": seed}  # without cuts: rounding decides nothing among unlikely tokens
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self._refused(answer, model)
            return None
        said = answer.json()
        ids, version = said["choices"][0]["token_ids"], said.get("adapter_version", "base")
        before = self._known.setdefault((version, question, seed), ids)
        shared = min(len(ids), len(before))
        if ids[:shared] != before[:shared] or len(ids) != length:
            self.wrong.append(f"{model} ({version[:8]}) said {ids} to {question!r}, seed {seed}, before {before}")
        if len(ids) > len(before):
            self._known[version, question, seed] = ids
        self.counts["answers of the base model" if version == "base" else "answers of adapters"] += 1
        self.counts["of them while training"] += "training_ms" in said
        return str(version)

    def _refused(self, answer: httpx.Response, model: str) -> None:
        """A full server may say so; a version that was thinned out is gone; all else is wrong."""
        gone = answer.status_code == 404 and model != self.base
        if not gone and (answer.status_code not in BUSY or "restart" in answer.text):
            self.wrong.append(f"{model}: {answer.status_code} {answer.text[:200]}")
        self.counts[f"refused with {answer.status_code}"] += 1

    async def leave(self, question: str, after: int) -> None:
        """Read a few pieces of a stream and go."""
        body = {"model": self.base, "messages": [{"role": "user", "content": question}], "max_tokens": 200}
        async with self._http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                after -= 1
                if after < 0:
                    break
        self.counts["left in mid-answer"] += 1

    # ------------------------------------------------------------ operator

    async def operator(self, until: float) -> None:
        """Jobs, names and memory, one change every second or two."""
        budget = (await self._http.get("/v1/memory")).json()["budget_bytes"]
        while time.monotonic() < until:
            what = self._rng.choice(("job", "job", "job", "budget", "rollback"))
            if what == "budget":
                size = int(budget * self._rng.uniform(0.7, 1.0))
                self._changed("budget", await self._http.post("/v1/memory", json={"budget_bytes": size}))
            elif what == "rollback":
                await self._rollback()
            else:
                await self._job()
            await asyncio.sleep(self._rng.uniform(0.5, 2.0))
        await self._http.post("/v1/memory", json={"budget_bytes": budget})

    async def _job(self) -> None:
        jobs = (await self._http.get("/v1/fine_tuning/jobs", params={"limit": 20})).json()["data"]
        open_jobs = [job for job in jobs if job["status"] in STATES]
        if len(open_jobs) < 2:
            settings = {"n_epochs": 1, "batch_size": 4, "save_steps": 5, "max_seq_length": 128}
            settings |= {"serve_while_training": self._rng.choice(("checkpoint", "live", "off"))}
            self._changed("create", await self._create(settings))
            return
        job = self._rng.choice(open_jobs)
        action = "resume" if job["status"] == "paused" else self._rng.choice(("pause", "pause", "pause", "cancel"))
        self._changed(action, await self._http.post(f"/v1/fine_tuning/jobs/{job['id']}/{action}"))

    async def _rollback(self) -> None:
        listed = [model["id"] for model in (await self._http.get("/v1/models")).json()["data"]]
        versions = [name for name in listed if "@" in name]
        if versions:
            name, step = self._rng.choice(versions).rsplit("@", 1)
            said = await self._http.post(f"/v1/models/{name}/rollback", json={"step": int(step)})
            self._changed("rollback", said)

    def _changed(self, action: str, answer: httpx.Response) -> None:
        """4xx: the job or version was not in that state any more, which only the server can know."""
        self.counts[f"{action}, {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code not in BUSY:
            self.wrong.append(f"{action}: {answer.status_code} {answer.text[:200]}")

    # ------------------------------------------------------------ end

    async def end(self) -> None:
        """Cancel what trains; nothing may be left, and the base model must be what it was."""
        for job in (await self._http.get("/v1/fine_tuning/jobs", params={"limit": 50})).json()["data"]:
            if job["status"] in STATES:
                await self._http.post(f"/v1/fine_tuning/jobs/{job['id']}/cancel")
            elif job["status"] == "failed":
                self.wrong.append(f"job {job['id']} failed: {job['error']}")
        await asyncio.to_thread(wait_quiet, str(self._http.base_url).rstrip("/"), QUIET_S)
        values = Scrape((await self._http.get("/metrics")).text).values
        left = {name: values[f"num_requests_{name}"] for name in ("running", "waiting")}
        if any(left.values()):
            self.wrong.append(f"requests at the end: {left}")
        for model in (await self._http.get("/v1/models")).json()["data"]:
            listed = (model.get("fineinfer") or {}).get("version")
            if listed is not None and (got := await self.ask(model["id"], QUESTIONS[0], LONGEST, None)) != listed:
                self.wrong.append(f"{model['id']} is version {listed}, but {got} answers at the end")
            self.counts["names asked at the end"] += listed is not None
        for question in QUESTIONS:
            await self.ask(self.base, question, LONGEST, None)


async def run(url: str, args: argparse.Namespace, file: Path) -> Soak:
    """Upload, ask everything once, then all at the same time."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits, trust_env=False) as http:
        upload = await http.post("/v1/files", files={"file": file.open("rb")}, data={"purpose": "fine-tune"})
        soak = Soak(http, random.Random(args.seed), upload.json()["id"])
        await soak.begin()
        until = time.monotonic() + args.seconds
        await asyncio.gather(soak.operator(until), *(soak.client(until) for _ in range(args.clients)))
        await soak.end()
    return soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of `fineinfer serve`")
    args = parser.parse_args()
    flags = ["--dtype", "float32", "--max-loras", "3", "--max-model-len", "1024", *args.serve_flags]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, local_server(*flags) as server:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, ROWS, 40)
        server.wait_until_ready(READY_S, lambda line: None)
        soak = asyncio.run(run(server.url, args, rows))
        if soak.wrong:
            print(server.log_tail(40), file=sys.stderr)
    for what, count in sorted(soak.counts.items()):
        print(f"{count:6d} {what}")
    print(f"{len(soak.wrong)} wrong" + "".join(f"\n  {line}" for line in soak.wrong[:20]))
    return int(bool(soak.wrong))


if __name__ == "__main__":
    sys.exit(main())
