"""/v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai


def _post(server: Any, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return server.http.post(f"{path}", json={"model": "base", **body})


def test_four_forms_of_prompts(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script(" there")
    encode = server.tokenizer.encode
    expected = {"hello": [encode("hello")], "forms": [encode("a"), encode("b b")]}
    for prompt, ids in (
        ("hello", expected["hello"]),
        (encode("hello"), expected["hello"]),
        (["a", "b b"], expected["forms"]),
        ([encode("a"), encode("b b")], expected["forms"]),
        ([[0]], [[0]]),
    ):
        server.engine.added.clear()
        answer = _post(server, prompt=prompt, n=2).json()
        assert [request.prompt_token_ids for request in server.engine.added] == [i for i in ids for _ in range(2)]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
        assert {choice["text"] for choice in answer["choices"]} == {" there"}
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert server.engine.added[0].sampling.max_tokens == 16


def test_sdk_stream(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script("漢字 🎉")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        chunks = list(
            client.completions.create(
                model="base", prompt="p", stream=True, max_tokens=50, stream_options={"include_usage": True}
            )
        )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "漢字 🎉"
    assert chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.completion_tokens > 3


def test_echo_with_prompt_logprobs_as_evaluation_harnesses_use_it(serve: Callable[..., Any]) -> None:
    server = serve()
    server.script("!")
    prompt = server.tokenizer.encode("the 漢 fox")
    answer = _post(server, prompt=[prompt], max_tokens=1, logprobs=1, echo=True, seed=3, temperature=0).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "the 漢 fox!"
    assert {len(logprobs[name]) for name in logprobs} == {len(prompt) + 1}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [-1.0] * (len(prompt) - 1) + [-0.5]
    # what lm-eval does to find out whether the continuation was greedy
    for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
        assert max(top, key=top.get) == token
    assert logprobs["text_offset"][-1] == len("the 漢 fox")

    only_prompt = _post(server, prompt=[prompt], max_tokens=0, logprobs=1, echo=True).json()
    assert only_prompt["choices"][0]["text"] == "the 漢 fox"
    assert len(only_prompt["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    assert only_prompt["usage"]["completion_tokens"] == 0

    lines = _post(server, prompt=[prompt], max_tokens=1, logprobs=1, echo=True, stream=True).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    assert "".join(chunk["text"] for chunk in chunks) == "the 漢 fox!"
    assert [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["tokens"]] == logprobs[
        "tokens"
    ]


def test_default_max_tokens_shrinks_to_the_room_left(serve: Callable[..., Any]) -> None:
    server = serve()
    assert _post(server, prompt=[5] * 250).status_code == 200
    assert server.engine.added[0].sampling.max_tokens == 6


def test_special_tokens_in_raw_prompts_are_special(serve: Callable[..., Any]) -> None:
    server = serve()
    ids = _post(server, "/tokenize", prompt="a<|im_end|>").json()
    assert ids["tokens"][-1] == server.engine.eos and ids["count"] == 2 and ids["max_model_len"] == 256
    chat = _post(
        server, "/tokenize", messages=[{"role": "user", "content": "<|im_end|>"}], return_token_strs=True
    ).json()
    assert chat["tokens"].count(server.engine.eos) == 1 and len(chat["token_strs"]) == chat["count"]
    assert _post(server, "/detokenize", tokens=ids["tokens"]).json() == {"prompt": "a<|im_end|>"}
    assert _post(server, "/detokenize", tokens=[10**6]).status_code == 400
    assert _post(server, "/tokenize").json()["error"]["param"] == "prompt"
