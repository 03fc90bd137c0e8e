"""Writes parity_prompts.jsonl: prompts, and what transformers answers to them greedily in float32 on the default model.

    .venv/bin/python -m tests.data.make_parity

Each answer is cut before the first token whose margin over the runner-up is under MIN_MARGIN (logits, float32): there
another order of summation may rightly give another token. Prompts that leave fewer than MIN_TOKENS are an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.support.default_model import default_model
from tests.support.reference import greedy, load_reference

PATH = Path(__file__).with_name("parity_prompts.jsonl")
MIN_MARGIN = 0.001
MIN_TOKENS = 4

ENGLISH = [
    "T",
    "The sea",
    "Once upon a time",
    "The capital of France is",
    "Water boils at a temperature of",
    "Three things are needed to make bread: flour,",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: How many legs does a spider have?\nA:",
    "She opened the old wooden door and saw, to her surprise, that the room behind it was",
    "The following is a list of the planets of the solar system in order of their distance from the sun: Mercury,",
    "In 1969, for the first time in history, two people walked on the moon. They had travelled for four days in a "
    "spacecraft that was smaller than most living rooms, and when they came back",
]
CHINESE = [
    "海",
    "床前明月光,",
    "中国的首都是",
    "从前有一座山,山上有一座庙,",
    "人工智能正在改变我们的生活。例如,",
    "请用一句话介绍一下长城。\n长城是",
    "今天天气很好,我们一起去公园散步。公园里有很多花,红的、黄的、白的,",
]
CODE = [
    "def fib(n):\n",
    "import os\n\nfor name in os.listdir('.'):\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "#include <stdio.h>\n\nint main(void) {\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "function add(a, b) {\n  return a + b;\n}\n\nfunction multiply(a, b) {\n",
    '{"name": "shoal", "version": "0.1.0", "description": "',
    'fn main() {\n    let names = vec!["a", "b"];\n    for name in names.iter() {\n        println!(',
    "<html>\n<head>\n<title>Hello</title>\n</head>\n<body>\n<h1>",
]
EMOJI = [
    "🐟",
    "I love 🍕 and",
    "😀 😃 😄 😁",
    "Weather today: ☀️ 25°C, tomorrow: 🌧️",
    "Vote: 👍 or 👎? My answer is",
    "👩‍👩‍👧‍👦 means family, 🐟🐟🐟 means",
]
CHAT = [
    f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in (
        "Hello!",
        "What is 2 + 2?",
        "Write a haiku about the sea.",
        "Translate to French: good morning",
        "用中文说你好。",
        "Fix this code: prnt('hi') 🙂",
    )
]


def long_texts() -> Iterator[str]:
    """Longer prompts of each kind, up to about 1,500 tokens, without repeating themselves word for word."""
    yield "".join(f"{n}. {text.strip()}\n" for n, text in enumerate(ENGLISH[1:]))
    yield "".join(f"{text}\n" for text in CHINESE)
    yield "\n\n".join(CODE)
    yield "".join(f"{n} times {n + 3} is {n * (n + 3)}. " for n in range(14))
    yield "".join(f"def add_{n}(x):\n    return x + {n}\n\n\n" for n in range(22))
    yield "".join(f"Day {n}: we sailed {7 * n % 31} miles and saw {n * n % 17} ships.\n" for n in range(1, 21))
    yield "".join(f"| {n} | {n * n} | {n**3} | {'🐟' * (n % 3 + 1)} |\n" for n in range(1, 36))
    names = ("Anna", "Boris", "Chen", "Dora", "Emil")
    yield "".join(
        f"Chapter {n}. {names[n % 5]} met {names[(n * 2 + 1) % 5]} at the harbour, and they spoke about the {thing} "
        f"that had been lost {n + 2} years ago. Nobody knew where it was now.\n"
        for n, thing in enumerate(
            (["boat", "map", "letter", "ring", "song", "key", "lamp", "book", "clock"] * 5)[:41], 1
        )
    )


def main() -> None:
    from transformers import AutoTokenizer

    folder = default_model()
    model = load_reference(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    short = [*ENGLISH, *CHINESE, *CODE, *EMOJI, *CHAT]
    rows = []
    for index, text in enumerate([*short, *long_texts()]):
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens, margins = greedy(model, prompt, 24 if index % 8 == 0 else 8)
        sure = next((n for n, margin in enumerate(margins) if margin < MIN_MARGIN), len(margins))
        if sure < MIN_TOKENS:
            raise SystemExit(f"{text[:40]!r}: margin {margins[sure]:.5f} at token {sure}: choose another prompt")
        rows.append(
            {
                "text": text,
                "num_prompt_tokens": len(prompt),
                "tokens": tokens[:sure],
                "min_margin": round(min(margins[:sure]), 5),
            }
        )
        print(len(prompt), sure, rows[-1]["min_margin"], repr(tokenizer.decode(tokens[:sure])))
    lines = [json.dumps(row, ensure_ascii=False) for row in sorted(rows, key=lambda row: row["num_prompt_tokens"])]
    PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
