"""The main job: one long system prompt, ten questions, nine of them skip it. With OpenAI's own client."""

from typing import Any

import httpx
import openai
import pytest

from tests.journeys.conftest import Running

SYSTEM = (
    "You are the night porter of the Grand Hotel at the lake. You are kind, brief and exact. Breakfast is from seven "
    "to ten in the garden room. The pool on the roof is open from eight to twenty and towels lie beside it. The last "
    "boat to the island leaves at half past six from the small pier behind the kitchen, and the first one in the "
    "morning at nine. Taxis take ten minutes. Dogs are welcome everywhere but in the pool. The key to the bicycle "
    "shed hangs at the desk, next to the barometer, and must be back by midnight. Guests who forgot their card show "
    "any paper with their name. Never promise a room with a view; there are only four of them. "
)
QUESTIONS = [
    "When is breakfast?",
    "Where is the pool?",
    "When does the last boat leave?",
    "How long does a taxi take?",
    "May I bring my dog?",
    "Where is the key to the bicycle shed?",
    "I forgot my card. What now?",
    "Can I have a room with a view?",
    "When does the pool close?",
    "Is there a boat in the morning?",
]


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def cached(usage: Any) -> int:
    """The cached tokens of a usage, which must be there and be an integer."""
    assert type(usage.prompt_tokens_details.cached_tokens) is int
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    return usage.prompt_tokens_details.cached_tokens


def test_nine_of_ten_questions_skip_the_system_prompt(client: openai.OpenAI, server: Running) -> None:
    model = client.models.list().data[0].id
    before = server.metrics()["foreword_prompt_tokens_cached_total"]
    counts: list[int] = []
    for question in QUESTIONS:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            max_tokens=4,
            temperature=0,
        )
        assert answer.choices[0].message.content
        assert answer.usage is not None
        counts.append(cached(answer.usage))
    assert counts[0] == 0
    shared = _shared(server, QUESTIONS[0], QUESTIONS[1])
    assert all(count >= shared // 16 * 16 for count in counts[1:]), (counts, shared)
    assert server.metrics()["foreword_prompt_tokens_cached_total"] - before == sum(counts)


def _shared(server: Running, *questions: str) -> int:
    """Tokens that conversations of different questions begin with together."""
    head = {"role": "system", "content": SYSTEM}
    chats = [server.assembly.front.render_chat([head, {"role": "user", "content": text}]) for text in questions]
    return next(place for place, tokens in enumerate(zip(*chats, strict=False)) if len(set(tokens)) > 1)


def test_chat_streamed_and_whole_agree(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Count from one to ten in words, please, and slowly at that."}]
    wishes: Any = {
        "model": "SmolLM2-135M-Instruct",
        "messages": messages,
        "max_completion_tokens": 12,
        "temperature": 0,
    }
    client.chat.completions.create(**wishes)  # so that both find the same
    whole = client.chat.completions.create(**wishes, logprobs=True, top_logprobs=2)
    chunks = list(
        client.chat.completions.create(
            **wishes, logprobs=True, top_logprobs=2, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert cached(chunks[-1].usage) == cached(whole.usage) > 0
    assert chunks[-1].usage == whole.usage
    choices: list[Any] = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    logprobs = [row for choice in choices for row in choice.logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens
    assert all(row.logprob <= 0 and len(row.top_logprobs) == 2 for row in logprobs)
    assert all(row.logprob == row.top_logprobs[0].logprob for row in logprobs)  # temperature 0 takes the best


def test_completions_streamed_and_whole_agree(client: openai.OpenAI) -> None:
    prompt = "Roses are red, violets are blue, sugar is sweet, and so are you. Once upon a time there was"
    wishes: Any = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    first = client.completions.create(**wishes)
    whole = client.completions.create(**wishes, logprobs=1)
    chunks = list(client.completions.create(**wishes, logprobs=1, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert first.choices[0].text == whole.choices[0].text
    assert cached(first.usage) == 0
    assert cached(chunks[-1].usage) == cached(whole.usage) >= 16
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].logprobs.tokens) == 12


def test_token_ids_give_the_same_answer_as_their_text(client: openai.OpenAI, server: Running) -> None:
    text = "The seven seas are the Arctic, the Atlantic, the Indian, the Pacific and"
    ids = list(server.assembly.front.tokenizer.encode(text))
    wishes: Any = {"model": "SmolLM2-135M-Instruct", "max_tokens": 6, "temperature": 0}
    assert (
        client.completions.create(prompt=ids, **wishes).choices[0].text
        == client.completions.create(prompt=text, **wishes).choices[0].text
    )


def test_several_prompts_answer_as_each_alone(client: openai.OpenAI) -> None:
    prompts = ["The sun rises in the", "Two and two make", "A triangle has"]
    wishes: Any = {"model": "SmolLM2-135M-Instruct", "max_tokens": 5, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **wishes).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, **wishes)
    assert [choice.text for choice in together.choices] == alone


def test_seeds_and_stops(client: openai.OpenAI, server: Running) -> None:
    wishes: Any = {"model": "SmolLM2-135M-Instruct", "prompt": "My favourite animal is", "max_tokens": 10}
    texts = [client.completions.create(**wishes, temperature=1.5, seed=seed).choices[0].text for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1
    whole = client.completions.create(**wishes, temperature=0).choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    before = server.metrics()
    stopped = client.completions.create(**wishes, temperature=0, stop=[stop]).choices[0]
    assert stopped.text == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    server.drained()
    ended = {key: value - before[key] for key, value in server.metrics().items() if "requests_finished" in key}
    assert {key: num for key, num in ended.items() if num} == {"foreword_requests_finished_total{finish=stop}": 1}


def test_errors_come_as_openais_own_classes(client: openai.OpenAI) -> None:
    wishes: Any = {"prompt": "x", "model": "SmolLM2-135M-Instruct"}
    with pytest.raises(openai.NotFoundError):
        client.completions.create(prompt="x", model="gpt-9")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**wishes, n=3)
    assert refused.value.param == "n"
    with pytest.raises(openai.UnprocessableEntityError, match="did you mean 'prefix_length'"):
        client.completions.create(**wishes, extra_body={"cache": {"prefix_lenght": 3}})


def test_the_plain_form(server: Running) -> None:
    prompt = "Once there was a miller who had three sons, a mill, a donkey and a cat. " * 3
    first = server.post("/chat", {"prompt": prompt, "max_tokens": 4}).json()
    again = server.post("/chat", {"prompt": prompt, "max_tokens": 4}).json()
    other = server.post("/chat", {"prompt": prompt, "max_tokens": 4, "prefix_length": 32}).json()
    assert first["text"] == again["text"] == other["text"]
    assert [reply["cache"]["reason"] for reply in (first, again, other)] == ["never_seen", "complete", "prefix_length"]
    block = server.assembly.limits.block_size
    assert first["cached_tokens"] == 0
    assert (again["prompt_tokens"] - 1) // block * block <= again["cached_tokens"] < again["prompt_tokens"]
    assert other["cached_tokens"] == 32
    for reply in (first, again, other):
        assert reply["cached_tokens"] + reply["computed_tokens"] == reply["prompt_tokens"]
        assert reply["cache"]["at_token"] == reply["cache"]["tiers"]["device"] == reply["cached_tokens"]
        timings = reply["cache"]["timings"]
        assert all(seconds >= 0 for seconds in timings.values())
        total = timings.pop("first_token_s")
        assert sum(timings.values()) == pytest.approx(total, abs=1e-4)
        assert min(timings[part] for part in ("tokenize_s", "lookup_s", "prefill_s")) > 0
    assert first["cache"]["saved"] == {"prefill_flops": 0, "seconds": 0}
    assert again["cache"]["saved"]["seconds"] > 0
    assert again["cache"]["saved"]["prefill_flops"] > other["cache"]["saved"]["prefill_flops"] > 0


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_usage_matrix(server: Running, route: str) -> None:
    """Miss, partial and full hit; streamed and whole: the field is there, an integer, and the two agree."""
    text = f"On the {route} route we speak of ships, of sails and of the wind that fills them every day of the year. "
    url = f"{server.url}/v1/{'chat/completions' if route == 'chat' else 'completions'}"
    seen: dict[str, list[int]] = {"whole": [], "streamed": []}
    for way in ("whole", "streamed"):
        server.assembly.worker.flush()
        for prompt in (text * 2, text * 2, text + "Or not."):
            body: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
            body |= {"messages": [{"role": "user", "content": prompt}]} if route == "chat" else {"prompt": prompt}
            if way == "streamed":
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            response = httpx.post(url, json=body, timeout=60, verify=False)
            usage = _last_usage(response.text) if way == "streamed" else response.json()["usage"]
            details = usage["prompt_tokens_details"]
            assert type(details["cached_tokens"]) is int
            assert 0 <= details["cached_tokens"] < usage["prompt_tokens"]
            seen[way].append(details["cached_tokens"])
    assert seen["whole"] == seen["streamed"]
    miss, full, partial = seen["whole"]
    assert miss < partial < full


def _last_usage(text: str) -> dict[str, Any]:
    import json

    last = json.loads(text.split("\n\n")[-3].removeprefix("data: "))
    assert last["choices"] == []
    return last["usage"]
