"""Model folders of random weights, for what the default model's shape does not allow.

`halves`: a Llama of SmolLM2-135M's size with 8 query and 4 key/value heads, so that 2 and 4 ranks can share it.

    python bench/models.py            makes it, and prints where it is
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from shoal import models
from shoal.fetch.home import shoal_home

HEADS, KV_HEADS = 8, 4
_GAIN = 1.5  # layers outweigh the embedding that they add to: greedy output wanders, and does not repeat


def halves() -> Path:
    """The folder, made where it is not there yet. Its tokenizer is the default model's."""
    folder = shoal_home() / "bench" / "llama-8-heads"
    if folder.exists():
        return folder
    source = models.pull(models.DEFAULT)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as made:
        for path in source.iterdir():
            if path.suffix == ".json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, Path(made) / path.name)
        (Path(made) / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(_weights(config), Path(made) / "model.safetensors", metadata={"format": "pt"})
        Path(made).rename(folder)
        Path(made).mkdir()  # which is removed at the end
    return folder


def _weights(config: dict[str, int]) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=chance) * (gain / columns**0.5)).bfloat16()

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 4.0)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = matrix(rows * dim, hidden, _GAIN)
        weights[f"{name}.self_attn.o_proj.weight"] = matrix(hidden, HEADS * dim, _GAIN)
        for part in ("gate", "up"):
            weights[f"{name}.mlp.{part}_proj.weight"] = matrix(inner, hidden, _GAIN)
        weights[f"{name}.mlp.down_proj.weight"] = matrix(hidden, inner, _GAIN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return weights


if __name__ == "__main__":
    print(halves())
