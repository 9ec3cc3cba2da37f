"""The stock openai client against a live server: chat, completions, models, files, a whole fine-tuning job."""

from __future__ import annotations

import json

import openai
import pytest

from .conftest import chat_rows

pytestmark = pytest.mark.e2e
TRICKY = "Repeat: 😀 你好, \"quotes\" \\ and 'single' — naïve café\ttab"


def test_chat_knows_a_fact_streamed_and_whole(embedded_server):
    client, base = embedded_server.openai, embedded_server.base_model
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=base, messages=messages, max_tokens=24, temperature=0)
    assert "Paris" in whole.choices[0].message.content
    stream = client.chat.completions.create(
        model=base, messages=messages, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_tricky_characters_survive_both_ways(embedded_server):
    client, base = embedded_server.openai, embedded_server.base_model
    echoed = client.completions.create(model=base, prompt=TRICKY, max_tokens=1, echo=True, temperature=0)
    assert echoed.choices[0].text.startswith(TRICKY)
    stream = client.chat.completions.create(
        model=base, messages=[{"role": "user", "content": TRICKY}], max_tokens=24, temperature=0, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    whole = client.chat.completions.create(
        model=base, messages=[{"role": "user", "content": TRICKY}], max_tokens=24, temperature=0
    )
    assert streamed == whole.choices[0].message.content


def test_sampling_is_reproducible_by_seed_and_n_gives_choices(embedded_server):
    client, base = embedded_server.openai, embedded_server.base_model
    ask = {"model": base, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    first = client.completions.create(**ask).choices[0].text
    assert client.completions.create(**ask).choices[0].text == first
    three = client.completions.create(**ask, n=3).choices
    assert [c.index for c in three] == [0, 1, 2] and len({c.text for c in three}) > 1


def test_logprobs_and_echo_align(embedded_server):
    client, base = embedded_server.openai, embedded_server.base_model
    prompt = [504, 3575, 282, 4649, 314]
    echoed = client.completions.create(model=base, prompt=prompt, max_tokens=1, echo=True, logprobs=1, temperature=0)
    logprobs = echoed.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.token_logprobs) == len(prompt) + 1
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        ({"model": "nope"}, 404, "model_not_found"),
        ({"max_tokens": 10**7}, 400, "context_length_exceeded"),
        ({"temperature": "hot"}, 400, "invalid_request_error"),
        ({"prompt": ""}, 400, "invalid_request_error"),
        ({"prompt": [49152 + 7]}, 400, "invalid_request_error"),
    ],
)
def test_bad_requests_are_refused_by_name_and_hurt_nobody(embedded_server, call, status, code):
    body = {"model": embedded_server.base_model, "prompt": "x", "max_tokens": 1} | call
    response = embedded_server.http.post("/v1/completions", json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code
    good = embedded_server.http.post(
        "/v1/completions", json={"model": embedded_server.base_model, "prompt": "x", "max_tokens": 1}
    )
    assert good.status_code == 200


def test_a_whole_fine_tuning_job_and_a_chat_with_its_model(embedded_server):
    client = embedded_server.openai
    body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chat_rows(12)).encode()
    file = client.files.create(file=("lockers.jsonl", body), purpose="fine-tune")
    assert client.files.retrieve(file.id).bytes == len(body)
    assert client.files.content(file.id).read() == body
    job = client.fine_tuning.jobs.create(
        model=embedded_server.base_model,
        training_file=file.id,
        suffix="lockers",
        seed=1,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1, "batch_size": 4}}},
    )
    assert job.status in ("validating_files", "queued", "running")
    assert embedded_server.wait_job(job.id)["status"] == "succeeded"
    job = client.fine_tuning.jobs.retrieve(job.id)
    assert job.fine_tuned_model == "lockers" and job.trained_tokens > 0
    assert job.id in [j.id for j in client.fine_tuning.jobs.list()]
    events = list(client.fine_tuning.jobs.list_events(job.id))
    assert any(event.type == "metrics" for event in events)
    checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
    assert checkpoints[0].fine_tuned_model_checkpoint == "lockers@3"
    assert {"lockers", embedded_server.base_model} <= {model.id for model in client.models.list()}
    for name in ("lockers", "lockers@3"):
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "What is the code of locker 3?"}], max_tokens=8
        )
        assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as conflict:
        client.fine_tuning.jobs.cancel(job.id)
    assert conflict.value.code == "job_state_conflict"


def test_a_malformed_file_fails_its_job_naming_the_lines(embedded_server):
    client = embedded_server.openai
    rows = [json.dumps(row) for row in chat_rows(5)]
    rows[2] = '{"messages": [{"role": "user"'
    rows[4] = json.dumps({"messages": [{"role": "narrator", "content": "x"}]})
    file = client.files.create(file=("bad.jsonl", "\n".join(rows).encode()), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(model=embedded_server.base_model, training_file=file.id)
    ended = embedded_server.wait_job(job.id)
    assert ended["status"] == "failed" and ended["error"]["code"] == "invalid_training_file"
    assert "line 3" in ended["error"]["message"] and "line 5" in ended["error"]["message"]
