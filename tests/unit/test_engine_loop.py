"""The whole engine in this process on a tiny random model: preemption, resizing, adapters, faults change no token."""

from __future__ import annotations

import time

import msgspec
import pytest
import torch
import zmq

from fineinfer.ipc import Codec
from fineinfer.kernels import attention_decode
from fineinfer.messages import AbortRequest, AddRequest, FinishRequest, FromEngine, Hello, ResizeKV, SetBudget
from fineinfer.request import SamplingParams
from fineinfer.runner.step_graphs import GraphKey, StepGraphs
from fineinfer.scheduler.policy import Turn

from .engine_harness import BYTES_PER_SLOT, TOKEN, Harness, publish
from .training_job import write_job


@pytest.fixture
def make(tmp_path_factory):
    made: list[Harness] = []

    def build(**settings: object) -> Harness:
        made.append(Harness(tmp_path_factory.mktemp("e"), **({"max_loras": 2, "max_lora_rank": 4} | settings)))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


PROMPTS = {f"r{n}": [5 + (7 * n + i) % 90 for i in range(10 + 3 * n)] for n in range(6)}


def alone(make, **params: object) -> dict[str, list[int]]:
    """Each request's tokens on an engine that has nothing else to do."""
    quiet, tokens = make(), {}
    for name, prompt in PROMPTS.items():
        quiet.outputs.clear()
        quiet.add(name, prompt, **params)
        quiet.run()
        tokens[name] = quiet.tokens(name)
    return tokens


def test_preempted_requests_give_the_tokens_of_a_quiet_engine(make):
    sampled = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "min_tokens": 90}
    want = alone(make, **sampled, max_tokens=90)
    tight = make(kv_cache_memory_bytes=260 * BYTES_PER_SLOT, max_num_batched_tokens=32)
    for _ in range(20):  # finished outputs were short, so more are admitted than fit
        tight.parts.scheduler.predictor.record(None, 4)
    for name, prompt in PROMPTS.items():
        tight.add(name, prompt, **sampled, stop_token_ids=())

    def finish(turn: int) -> None:
        """They have no max_tokens: end them as an api worker does when a stop string matched."""
        for name, sequence in list(tight.parts.desk.open.items()):
            if len(sequence.output) >= 90:
                tight.send(FinishRequest(request_id=name, num_tokens=90))

    tight.run(finish)
    assert tight.parts.scheduler.num_preemptions > 0, "nothing was preempted, so nothing is tested"
    assert {name: tight.tokens(name)[:90] for name in PROMPTS} == want
    assert {tight.reason(name) for name in PROMPTS} == {"stop"}


def test_a_prompt_that_is_cut_in_other_places_when_it_runs_again_keeps_its_log_probabilities(make):
    prompt = [5 + (11 * i) % 90 for i in range(60)]
    asked = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": 1, "priority": 1}
    quiet = make(max_num_batched_tokens=16)
    quiet.add("r", **asked)
    quiet.run()
    tight = make(max_num_batched_tokens=16, kv_cache_memory_bytes=110 * BYTES_PER_SLOT)
    tight.add("decodes beside the first chunks only", [7, 8, 9], max_tokens=6)

    def come(turn: int) -> None:
        if turn == 1:
            tight.add("r", **asked)
        if turn == 3:
            tight.add("takes its slots", [9 + i % 70 for i in range(90)], max_tokens=4)

    tight.run(come)
    assert tight.parts.scheduler.num_preemptions == 1
    got, want = (harness.outputs["r"][0].prompt_logprobs for harness in (tight, quiet))
    assert [entry and entry.token_id for entry in got] == [None, *prompt[1:]]
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_shrinking_and_growing_while_requests_run_changes_no_token(make):
    want = alone(make, max_tokens=60)
    moving = make(kv_cache_memory_bytes=2000 * BYTES_PER_SLOT, max_num_batched_tokens=512)
    moving.add("first", [5] * 400, max_tokens=100)  # takes the low slots, then leaves: the others must move down
    for name, prompt in PROMPTS.items():
        moving.add(name, prompt, max_tokens=60)
    sizes = set()

    def resize(turn: int) -> None:
        if turn == 20:
            moving.send(AbortRequest(request_id="first"))
        if turn > 20:
            moving.send(ResizeKV(num_slots=[600, 2000, 900][turn % 3]))
        sizes.add(moving.parts.ladder._kv.num_slots)

    moving.run(resize)
    assert {name: moving.tokens(name) for name in PROMPTS} == want
    assert len(sizes) >= 3 and moving.parts.ladder._kv.epoch > 0, "no live slot was moved, so nothing is tested"


def test_a_smaller_budget_is_followed_and_a_larger_one_is_grown_into(make):
    want = alone(make, max_tokens=60)
    harness = make(kv_cache_memory_bytes=3000 * BYTES_PER_SLOT)
    kv, governor = harness.parts.ladder._kv, harness.parts.ladder._governor
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, max_tokens=60)
    fixed = governor.budget_bytes - governor.free_bytes - 3000 * BYTES_PER_SLOT
    sizes = []

    def change(turn: int) -> None:
        if turn == 10:
            harness.send(SetBudget(num_bytes=fixed + 100 * BYTES_PER_SLOT))  # less than the running requests need
        if turn > 12 and not harness.parts.desk.open:
            return
        sizes.append(kv.num_slots)

    harness.run(change)
    assert {name: harness.tokens(name) for name in PROMPTS} == want
    assert sizes[5] == 3000 and 100 < sizes[20] < 1000, "the pool keeps what the running requests may still need"
    harness.outputs.clear()
    harness.add("after", PROMPTS["r0"], max_tokens=40)
    harness.run()
    assert kv.num_slots == 100 and governor.free_bytes == 0  # they have ended: the rest was given back
    harness.send(SetBudget(num_bytes=fixed + 2000 * BYTES_PER_SLOT))
    harness.loop.step()
    time.sleep(0.05)
    harness.loop.step()
    assert kv.num_slots == 2000


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_prompt_seen_before_is_not_computed_again(make, tmp_path, monkeypatch, backend):
    monkeypatch.setattr(attention_decode, "TARGET_PROGRAMS", 8)
    harness = make(attention_backend=backend, max_num_seqs=4, max_num_batched_tokens=32)
    prompt = PROMPTS["r3"]
    publish(harness, "a", tmp_path / "one", 1)

    def ask(name: str, prompt: list[int], **how: object) -> tuple[list[int], int]:
        harness.outputs.clear()
        harness.add(name, prompt, max_tokens=3, **how)
        harness.run()
        return harness.tokens(name), harness.outputs[name][0].cached_tokens

    want, cached = ask("first", prompt)
    assert cached == 0
    assert ask("again", prompt) == (want, len(prompt) - 1)
    # its answer is known as well, up to the last token, which was never computed
    longer, cached = ask("turn 2", [*prompt, *want, 7])
    assert cached == len(prompt) + len(want) - 1
    # neither another adapter nor another salt shares it, and log-probabilities need every row
    assert ask("adapted", prompt, adapter="a")[1] == 0
    assert ask("salted", prompt, salt="tenant") == (want, 0)
    assert ask("logprobs", prompt, prompt_logprobs=0) == (want, 0)
    off = make(attention_backend=backend, no_enable_prefix_caching=True, max_num_seqs=4, max_num_batched_tokens=32)
    off.add("turn 2", [*prompt, *want, 7], max_tokens=3)
    off.run()
    assert off.tokens("turn 2") == longer and off.parts.ladder._kv.num_used == 0


def test_more_adapters_than_slots_wait_their_turn(make, tmp_path):
    want = {}
    for seed, name in enumerate(("a", "b", "c"), start=1):
        single = make(max_loras=1)
        publish(single, name, tmp_path / name, seed)
        single.loop.step()
        single.add("r", PROMPTS["r1"], adapter=name, max_tokens=12)
        single.run()
        want[name] = single.tokens("r")
    assert len({tuple(tokens) for tokens in want.values()}) == 3, (
        "the adapters make no difference, so nothing is tested"
    )
    shared = make(max_loras=2)
    for seed, name in enumerate(("a", "b", "c"), start=1):
        publish(shared, name, tmp_path / name, seed)
    shared.loop.step()
    for round_number in range(2):
        for name in ("a", "b", "c"):
            shared.add(f"{name}{round_number}", PROMPTS["r1"], adapter=name, max_tokens=12)
    shared.add("base", PROMPTS["r1"], max_tokens=12)
    shared.run()
    for name in ("a", "b", "c"):
        assert shared.tokens(f"{name}0") == shared.tokens(f"{name}1") == want[name]
        assert shared.outputs[f"{name}0"][-1].adapter_step is not None
    assert shared.tokens("base") == alone(make, max_tokens=12)["r1"]


def test_a_request_keeps_the_version_it_began_with(make, tmp_path):
    harness = make()
    publish(harness, "a", tmp_path / "one", 1)
    harness.loop.step()
    harness.add("before", PROMPTS["r0"], adapter="a", max_tokens=30)

    def republish(turn: int) -> None:
        if turn == 5:
            publish(harness, "a", tmp_path / "two", 2)
        if turn == 8:
            harness.add("after", PROMPTS["r0"], adapter="a", max_tokens=30)
            harness.add("pinned", PROMPTS["r0"], adapter="a@1", max_tokens=30)

    harness.run(republish)
    assert {output.adapter_step for output in harness.outputs["before"]} == {1}
    assert {output.adapter_step for output in harness.outputs["after"]} == {2}
    assert harness.tokens("pinned") == harness.tokens("before") != harness.tokens("after")


def test_a_request_that_breaks_the_forward_ends_alone(make, monkeypatch, caplog):
    want = alone(make, max_tokens=10)
    harness = make()
    launch = harness.parts.runner.launch

    def breaking(chunks):
        if any(chunk.sequence.request_id == "r3" and len(chunk.sequence.output) == 4 for chunk in chunks):
            raise RuntimeError("boom")
        return launch(chunks)

    monkeypatch.setattr(harness.parts.runner, "launch", breaking)
    for name, prompt in PROMPTS.items():
        harness.add(name, prompt, max_tokens=10)
    harness.run()
    assert harness.reason("r3") == "error" and len(harness.tokens("r3")) == 4
    assert all(harness.tokens(name) == want[name] for name in PROMPTS if name != "r3")


class RunAgain(StepGraphs):
    """Where nothing can be captured: a replay runs the step again, on padded inputs at their fixed places."""

    def find(self, num_rows: int, mixed: bool, adapted: bool) -> GraphKey | None:
        return next((k for k in self.keys()[::-1] if k.num_rows >= num_rows and k[1:] == (mixed, adapted)), None)

    def replay(self, key: GraphKey) -> torch.Tensor:
        self.used = getattr(self, "used", set()) | {key}
        return self._forward(key)


NUM_TOKENS = 7  # the interpreter takes a second for a step


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows hold anything, the interpreter's numpy remarks it
@pytest.mark.parametrize("captured", [False, True])
def test_the_kernels_engine_gives_the_tokens_of_the_reference_one(make, tmp_path, monkeypatch, captured):
    """One step in flight, tokens fed on the device, adapters and every sampling parameter at once."""
    monkeypatch.setattr(attention_decode, "TARGET_PROGRAMS", 8)  # the interpreter pays for every program
    asked = {  # the first alone, then four at once: the last comes when the adapted one has gone
        "penalized": {
            "prompt": PROMPTS["r2"], "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3,
            "logit_bias": {5: 2.0}, "min_tokens": NUM_TOKENS, "ignore_eos": False, "prompt_logprobs": 1,
        },
        "greedy": {"prompt": PROMPTS["r0"]},
        "stopped": {"prompt": PROMPTS["r0"], "stop_token_ids": (61,)},
        "adapted": {"prompt": PROMPTS["r3"], "adapter": "a", "max_tokens": 3},
        "drawn": {"prompt": PROMPTS["r1"], "temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9, "logprobs": 2},
    }  # fmt: skip

    def run(**settings: object) -> Harness:
        harness = make(max_num_seqs=4, max_num_batched_tokens=64 if captured else 32, **settings)
        if captured and settings:
            runner = harness.parts.runner
            runner._logits = torch.empty(4, 97)  # capturing makes it
            runner._graphs = RunAgain(runner._enter_padding, runner._captured_step, 4, 64)
        publish(harness, "a", tmp_path / "one", 1)
        harness.loop.step()
        for name, params in asked.items():
            harness.add(name, **({"max_tokens": NUM_TOKENS} | params))
            if name == "penalized":
                harness.loop.step()
        harness.run()
        return harness

    want, got = run(), run(attention_backend="triton", kv_cache_memory_bytes=80 * BYTES_PER_SLOT)
    for name in asked:
        assert got.tokens(name) == want.tokens(name) and got.reason(name) == want.reason(name), name
    assert got.reason("stopped") == "stop" and len(got.tokens("stopped")) < NUM_TOKENS
    entries = [[entry for output in h.outputs["drawn"] for entry in output.logprobs or []] for h in (want, got)]
    assert [entry.token_id for entry in entries[1]] == got.tokens("drawn")
    for ours, theirs in zip(*entries, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    if captured:
        used = got.parts.runner._graphs.used
        assert {key[1:] for key in used} == {(False, False), (False, True), (True, False), (True, True)}
    prompts = [h.outputs["penalized"][0].prompt_logprobs for h in (want, got)]
    assert [e and e.token_id for e in prompts[1]] == [e and e.token_id for e in prompts[0]]


def test_more_requests_than_rows_of_a_step_are_refused_at_start(make):
    with pytest.raises(ValueError, match="--max-num-seqs 17 is above the 16 rows"):
        make(max_num_seqs=17, max_num_batched_tokens=16)
    assert make(max_num_batched_tokens=16).parts.scheduler._limits.max_num_seqs == 16


def test_aborts_and_refusals_leave_nothing(make):
    harness = make(kv_cache_memory_bytes=100 * BYTES_PER_SLOT)
    harness.add("too-long", [5] * 90, max_tokens=20)
    harness.add("empty", [])
    harness.add("foreign", [97])
    harness.add("nobody", [5], adapter="nobody")
    harness.add("left", [5] * 30, max_tokens=60)
    harness.add("stays", [5] * 30, max_tokens=20)

    def leave(turn: int) -> None:
        if turn == 6:
            harness.send(AbortRequest(request_id="left"))
            harness.send(AbortRequest(request_id="never-was"))

    harness.run(leave)
    codes = {name: harness.outputs[name][-1].error_code for name in ("too-long", "empty", "foreign", "nobody")}
    assert codes == {
        "too-long": "context_length_exceeded",
        "empty": "invalid_request_error",
        "foreign": "invalid_request_error",
        "nobody": "model_not_found",
    }
    assert harness.reason("left") == "abort" and harness.reason("stays") == "length"


def test_a_worker_that_comes_again_has_lost_what_it_asked_before(make):
    harness = make()
    desk = harness.parts.desk

    def worker(*messages: object) -> zmq.Socket[bytes]:
        """A connection of the api worker."""
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"api-0")
        socket.connect(harness.address)
        send(socket, *messages)
        return socket

    def send(socket: zmq.Socket[bytes], *messages: object) -> None:
        for message in messages:
            socket.send_multipart([TOKEN, Codec(FromEngine).encode(message)])
        for _ in range(3):
            harness.loop.step()

    def ask(name: str) -> AddRequest:
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        return AddRequest(request_id=name, prompt_token_ids=[5] * 30, sampling=sampling, arrival_s=time.monotonic())

    want = alone(make, max_tokens=30)["r1"]
    harness.add("another's", PROMPTS["r1"], max_tokens=30)
    first = worker(Hello(link="one"), ask("a"), ask("b"))
    assert set(desk.open) == {"another's", "a", "b"}
    send(first, Hello(), Hello(link="one"))
    assert set(desk.open) == {"another's", "a", "b"}, "only asks how things are"
    first.close(0)
    second = worker(Hello(link="two"), ask("a"))
    assert set(desk.open) == {"another's", "a"} and desk.open["a"].num_tokens < 40, "it is a new request"
    send(second, Hello(link="three"))
    assert set(desk.open) == {"another's"}
    second.close(0)
    harness.run()
    assert harness.tokens("another's") == want


def test_requests_go_on_at_once_while_a_unit_waits_for_memory(make, tmp_path, monkeypatch):
    harness = make()
    scheduler, training = harness.parts.scheduler, harness.parts.training
    monkeypatch.setattr(harness.parts.ladder, "lease_micro_batch", lambda trainer: False)
    monkeypatch.setattr(harness.parts.ladder, "holding", lambda now_s: False)
    training.start(write_job(tmp_path / "job"))
    harness.add("r", [5, 6, 7], max_tokens=3)
    harness.loop.step()
    assert scheduler.running
    eager = lambda load: Turn(admit=True, train=load.training_ready, infer=not load.training_ready)  # noqa: E731
    monkeypatch.setattr(scheduler, "_policy", eager)
    worked = [harness.loop.step() for _ in range(12)]
    assert all(worked[:4]) and not scheduler.running, "every second turn is theirs, and none is slept through"
    assert not any(worked[4:]), "nobody runs: a unit that waits for memory is no work"


def test_what_a_job_may_take_holds_while_it_is_there(make, tmp_path):
    harness = make()
    training = harness.parts.training
    assert training.state(0.0).max_share == 1.0
    training.start(msgspec.structs.replace(write_job(tmp_path / "job"), max_share=0.25))
    assert training.state(0.0).max_share == 0.25
    training.cancel("job")
    assert training.state(0.0).max_share == 1.0
