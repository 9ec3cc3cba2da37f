"""Requests on a real `fineinfer serve`, over HTTP: who comes when, what each saw, what the server says of itself.

Arrivals are open-loop: a request's time runs from when it was due, however late this client was. Every output token is
asked for (``ignore_eos``), so runs differ in nothing but time.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gc
import itertools
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import aiohttp
import httpx
import msgspec
from harness import OtherLoad, percentile

DRAIN_S = 25.0  # by default requests that have not ended so long after the window are cancelled and counted
EDGE_S, POLL_S = 3.0, 0.02  # longest wait for an update to end at either edge of a window
JOB_S = 300.0
SERIES = re.compile(r"^(\w[\w:]*?)(?:\{(.*)\})? (\S+)$")
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds from the window's begin, prompt and output tokens."""

    due_s: float
    num_prompt: int
    num_output: int


def poisson(rate: float, seconds: float, lengths: Sequence[tuple[int, int]], seed: int = 7) -> list[Arrival]:
    """Arrivals at a rate a second; the same ones for every policy."""
    rng, due, found = random.Random(seed), 0.0, []
    while (due := due + rng.expovariate(rate)) <= seconds:
        found.append(Arrival(due, *rng.choice(lengths)))
    return found


def trace(path: Path, start_s: float, seconds: float) -> list[Arrival]:
    """A window of an Azure LLM trace (TIMESTAMP, ContextTokens, GeneratedTokens) in real time."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    found = []
    for row, at in zip(rows, times, strict=True):
        due = at - times[0] - start_s
        if 0.0 <= due <= seconds:
            found.append(Arrival(due, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return found


def fit(arrivals: Sequence[Arrival], max_model_len: int) -> tuple[list[Arrival], int]:
    """Arrivals with prompts cut to what the model can hold beside their output, and how many were cut."""
    fitted = []
    for arrival in arrivals:
        num_output = min(arrival.num_output, max_model_len // 2)
        fitted.append(Arrival(arrival.due_s, min(arrival.num_prompt, max_model_len - num_output), num_output))
    return fitted, sum(a != b for a, b in zip(arrivals, fitted, strict=True))


@dataclass
class Reply:
    """What came of one request; times of ``time.perf_counter``.

    Attributes:
        due: When it was to be sent.
        wanted: Output tokens asked for.
        sent: When it was.
        chunks: (when, tokens) of each piece of the stream.
        error: What went wrong, if anything.
    """

    due: float
    wanted: int
    sent: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def done(self) -> bool:
        """Whether all its tokens came."""
        return sum(count for _, count in self.chunks) == self.wanted

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return 1e3 * (self.chunks[0][0] - self.due)

    @property
    def tpot_ms(self) -> float:
        """(end - first token) / (tokens - 1), of a reply of two tokens or more."""
        return 1e3 * (self.chunks[-1][0] - self.chunks[0][0]) / (self.wanted - 1)

    def gaps_ms(self) -> list[float]:
        """Times between its tokens; tokens that came together share theirs."""
        gaps = []
        for (before, _), (after, count) in itertools.pairwise(self.chunks):
            gaps += [1e3 * (after - before) / max(1, count)] * count
        return gaps


@dataclass(frozen=True)
class Target:
    """The server under load.

    Attributes:
        url: Where it listens.
        model: Name of its base model.
        max_model_len: Longest prompt and output together.
        highest_id: Prompts are drawn from ids up to this one.
        seeds: One for each window: the same prompts twice would be found in the prefix cache.
    """

    url: str
    model: str
    max_model_len: int
    highest_id: int
    seeds: itertools.count[int]

    @classmethod
    def of(cls, url: str, highest_id: int) -> Target:
        """Ask a running server."""
        base = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
        return cls(url, base["id"], int(base["max_model_len"]), highest_id, itertools.count(1))


async def ask(session: aiohttp.ClientSession, target: Target, prompt: list[int], reply: Reply) -> None:
    """Stream one completion into its reply."""
    reply.sent = time.perf_counter()
    body = {
        "model": target.model, "prompt": prompt, "max_tokens": reply.wanted, "temperature": 0.0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    try:
        async with session.post(f"{target.url}/v1/completions", json=body) as response:
            if response.status != 200:
                reply.error = f"{response.status}: {(await response.read())[:300]!r}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    reply.error = str(event["error"])
                count = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
                if count:
                    reply.chunks.append((time.perf_counter(), count))
    except aiohttp.ClientError as error:
        reply.error = f"{type(error).__name__}: {error}"


async def run_window(
    target: Target, arrivals: Sequence[Arrival], seconds: float, job: str | None = None, drain_s: float = DRAIN_S
) -> Row:
    """Let the arrivals happen for ``seconds`` and wait for those that are late.

    Args:
        target: The server.
        arrivals: In order of time.
        seconds: Length of the window; training is counted over it.
        job: Trains beside them.
        drain_s: Requests that have not ended so long after the window are cancelled and counted.

    Returns:
        Latencies in milliseconds, rates a second, and what the server itself measured.
    """
    rng = random.Random(next(target.seeds))
    arrivals, num_cut = fit(arrivals, target.max_model_len)
    prompts = [[rng.randint(10, target.highest_id) for _ in range(arrival.num_prompt)] for arrival in arrivals]
    before, others = Scrape.of(target.url), OtherLoad()
    # aiohttp takes 60 us an event where httpx takes 150: sixty streams of one step would wait for each other for 9 ms
    session = aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=600.0), connector=aiohttp.TCPConnector(limit=0), read_bufsize=1 << 20
    )
    async with session, httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
        with no_collections():
            begin, tasks, replies = time.perf_counter(), [], []
            meter = asyncio.create_task(trained(client, target.url, job, begin, seconds))
            for arrival, prompt in zip(arrivals, prompts, strict=True):
                await asyncio.sleep(max(0.0, begin + arrival.due_s - time.perf_counter()))
                replies.append(Reply(begin + arrival.due_s, arrival.num_output))
                tasks.append(asyncio.create_task(ask(session, target, prompt, replies[-1])))
            await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
            late = (await asyncio.wait(tasks, timeout=drain_s))[1] if tasks else set()
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        train_tok_s = await meter
    served = summarize(replies, begin, len(late)) | {"cut_prompts": num_cut, "train_tok_s": train_tok_s}
    return served | Scrape.of(target.url).since(before) | {"cpu_share_of_others": others.share()}


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """A collection of everything would be measured as somebody's latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def summarize(replies: Sequence[Reply], begin: float, num_late: int) -> Row:
    """Latencies and rates of a window's replies; time per token and gaps of whole ones only."""
    done, begun = [reply for reply in replies if reply.done], [reply for reply in replies if reply.chunks]
    for error in {reply.error for reply in replies if reply.error is not None}:
        print(f"a request failed: {error}", flush=True)
    end = max((reply.chunks[-1][0] for reply in begun), default=begin)
    row: Row = {"requests": len(done), "unfinished": num_late, "failed": len(replies) - len(done) - num_late}
    columns = {
        "ttft": [reply.ttft_ms for reply in begun],
        "tpot": [reply.tpot_ms for reply in done if reply.wanted > 1],
    }
    for name, values in columns.items():
        row |= {f"{name}_p{share}_ms": percentile(values, share / 100) for share in (50, 90, 99)}
    row["ttft_max_ms"] = max(columns["ttft"], default=float("nan"))
    row["gap_p99_ms"] = percentile([gap for reply in done for gap in reply.gaps_ms()], 0.99)
    tokens = sum(count for reply in begun for _, count in reply.chunks)
    row["output_tok_s"] = tokens / max(end - begin, 1e-9)
    row["client_lag_p99_ms"] = percentile([1e3 * (reply.sent - reply.due) for reply in replies], 0.99)
    return row


# ---------------------------------------------------------------- training beside them


async def sample_training(url: str, samples: list[tuple[float, float]], every_s: float = 0.5) -> None:
    """Append (the engine's clock, device seconds trained so far), whenever there are newer numbers, until cancelled."""
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        while True:
            values = Scrape((await client.get(f"{url}/metrics")).text).values
            now_s = values.get("engine_clock_seconds", 0.0)
            if not samples or now_s > samples[-1][0]:
                samples.append((now_s, values.get("train_device_seconds_total", 0.0)))
            await asyncio.sleep(every_s)


async def trained(client: httpx.AsyncClient, url: str, job: str | None, begin: float, seconds: float) -> float:
    """Tokens a second that a job processed in a window, from the end of an update to the end of an update.

    A window of 25 s holds 50 to 100 updates; counted from edge to edge of the window, half an update would be lost on
    either side. An update that takes longer than ``EDGE_S`` is not waited for.
    """
    if job is None:
        return 0.0
    first = await _next_update(client, url, job)
    await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
    last = await _next_update(client, url, job)
    return max(0, last[1] - first[1]) / max(last[0] - first[0], 1e-9)


async def _next_update(client: httpx.AsyncClient, url: str, job: str) -> tuple[float, int]:
    """(when, tokens processed so far) of the next update's end."""
    tokens, deadline = await _processed(client, url, job), time.perf_counter() + EDGE_S
    while True:
        await asyncio.sleep(POLL_S)
        newest, now = await _processed(client, url, job), time.perf_counter()
        if newest != tokens or now > deadline:
            return now, newest


async def _processed(client: httpx.AsyncClient, url: str, job: str) -> int:
    events = (await client.get(f"{url}/v1/fine_tuning/jobs/{job}/events", params={"limit": 20})).json()["data"]
    return max((int((event["data"] or {}).get("processed_tokens", 0)) for event in events), default=0)


def training_alone(url: str, job: str, seconds: float) -> Row:
    """The rate of a job without requests."""

    async def measure() -> float:
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            return await trained(client, url, job, time.perf_counter(), seconds)

    before, others = Scrape.of(url), OtherLoad()
    rate = asyncio.run(measure())
    return {"train_tok_s": rate, "cpu_share_of_others": others.share()} | Scrape.of(url).since(before)


def start_job(target: Target, rows: Path, settings: dict[str, object], min_steps: int = 2) -> str:
    """Upload, create, wait until some updates are done; returns the job's id."""
    with httpx.Client(base_url=target.url, timeout=120.0, trust_env=False) as http:
        with rows.open("rb") as file:
            upload = http.post("/v1/files", files={"file": file}, data={"purpose": "fine-tune"}).json()
        method = {"type": "supervised", "supervised": {"hyperparameters": settings}}
        body = {"model": target.model, "training_file": upload["id"], "method": method}
        job = http.post("/v1/fine_tuning/jobs", json=body).json()
        deadline = time.monotonic() + JOB_S
        while time.monotonic() < deadline:
            state = http.get(f"/v1/fine_tuning/jobs/{job['id']}").json()
            if (state.get("progress") or {}).get("step", 0) >= min_steps:
                return str(job["id"])
            if state["status"] in ("failed", "cancelled"):
                raise SystemExit(f"error: the job ended: {state['error']}")
            time.sleep(0.1)
    raise SystemExit(f"error: the job made no {min_steps} updates in {JOB_S:.0f} s")


# ---------------------------------------------------------------- what the server says of itself


class Scrape:
    """One answer of /metrics.

    Args:
        text: Prometheus text.
    """

    def __init__(self, text: str) -> None:
        self.values: dict[str, float] = {}  # sums over labels
        self.buckets: dict[str, dict[float, float]] = {}  # of histograms: bound -> cumulative count
        for line in text.splitlines():
            found = SERIES.match(line)
            if found is None:
                continue
            name, labels, value = found[1].removeprefix("fineinfer:"), found[2] or "", float(found[3])
            self.values[name] = self.values.get(name, 0.0) + value
            bound = re.search(r'le="([^"]+)"', labels)
            if name.endswith("_bucket") and bound is not None:
                bucket = self.buckets.setdefault(name.removesuffix("_bucket"), {})
                bucket[float(bound[1])] = bucket.get(float(bound[1]), 0.0) + value

    @classmethod
    def of(cls, url: str) -> Scrape:
        """Ask a server."""
        return cls(httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text)

    def since(self, before: Scrape) -> Row:
        """What the server measured between two scrapes; times in milliseconds."""

        def moved(name: str) -> float:
            return self.values.get(name, 0.0) - before.values.get(name, 0.0)

        def mean_ms(name: str) -> float:
            return 1e3 * moved(f"{name}_sum") / moved(f"{name}_count") if moved(f"{name}_count") else float("nan")

        return {
            "server_ttft_p99_ms": 1e3 * self.quantile(before, "time_to_first_token_seconds", 0.99),
            "server_queue_mean_ms": mean_ms("request_queue_time_seconds"),
            "server_training_mean_ms": mean_ms("request_training_time_seconds"),
            "train_device_s": moved("train_device_seconds_total"),
            "preemptions": moved("num_preemptions_total"),
            "dropped_layers": moved("train_kept_layers_dropped_total"),
            "kv_resizes": moved("kv_resizes_total"),
        }

    def quantile(self, before: Scrape, name: str, share: float) -> float:
        """A quantile of what a histogram gained since, linear within its bucket, as Prometheus gives it; seconds."""
        older = before.buckets.get(name, {})
        gained = sorted((bound, count - older.get(bound, 0.0)) for bound, count in self.buckets.get(name, {}).items())
        if not gained or gained[-1][1] <= 0:
            return float("nan")
        rank, low, below = share * gained[-1][1], 0.0, 0.0
        for bound, count in gained:
            if count >= rank:
                within = (rank - below) / max(count - below, 1e-9)
                return low if bound == float("inf") else low + within * (bound - low)
            low, below = bound, count
        return low


def wait_quiet(url: str, seconds: float = 10.0) -> None:
    """Until the server has no request left: cancelled ones end a little later."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            values = Scrape.of(url).values
            if not values.get("num_requests_running", 0) and not values.get("num_requests_waiting", 0):
                return
        time.sleep(0.2)
