"""A running service and OpenAI's own client: start `shoal serve`, then

python examples/openai_client.py [URL]
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI


def main(url: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("SHOAL_API_KEY", "none is needed on this machine"))
    model = client.models.list().data[0].id
    print("model:", model)

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a fish."}],
        max_tokens=32,
        temperature=0,
    )
    print("answer:", answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Why is the sea salty?"}],
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    print("stream:", end=" ")
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")

    scored = client.completions.create(model=model, prompt="The sea is", max_tokens=4, temperature=0, logprobs=3)
    print("completion:", repr(scored.choices[0].text), scored.choices[0].logprobs.token_logprobs)


if __name__ == "__main__":
    main(*sys.argv[1:])
