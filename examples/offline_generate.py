"""Many prompts through a model in this process, without a server.

python examples/offline_generate.py [MODEL]
"""

from __future__ import annotations

import sys

from shoal.llm import LLM, SamplingParams

PROMPTS = [
    "The sea is",
    "A recipe for bread: first,",
    "In the year 2100,",
]


def main(model: str = "smollm2-135m") -> None:
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    with LLM(model, max_model_len=512) as llm:
        # All prompts in one continuous batch.
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            print(f"{prompt!r} -> {output.text!r} ({output.choices[0].finish_reason})")

        # A conversation, rendered with the model's own chat template.
        messages = [{"role": "user", "content": "Name a fish."}]
        [answer] = llm.chat(messages, SamplingParams(max_tokens=32, temperature=0))
        print("chat:", answer.text)

        # One answer as it is made.
        print("stream:", end=" ")
        for delta in llm.stream(PROMPTS[0], params):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
