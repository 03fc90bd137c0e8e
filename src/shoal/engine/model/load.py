"""Weights from *.safetensors, mapped and copied straight to their place and number format; and the model's digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.engine.device import Device, num_cores
from shoal.engine.model.config import ModelConfig, read_json
from shoal.engine.model.linear import Adding, Linear, Vocabulary, make_linear
from shoal.engine.model.llama import Layer, Weights
from shoal.engine.parallel.comm import Alone, Comm
from shoal.engine.parallel.layout import WHOLE_MODEL, Part, Share, stage_of, whole
from shoal.engine.parallel.tensor import Elsewhere, SplitInputs, SplitVocabulary

_DIGEST_PIECE_BYTES = 8 << 20
_HARMLESS = ("rotary_emb.inv_freq",)  # computed values that some old checkpoints carry


class Checkpoint:
    """The tensors of a model folder by name. Use as a context manager; reading maps pages, it copies nothing."""

    def __init__(self, folder: Path) -> None:
        self._open_files = ExitStack()
        self._unread: set[str] = set()
        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: not a readable safetensors file: {error}") from None
            for name in file.keys():  # noqa: SIM118
                if name in self._file_of:
                    raise ValueError(f"{path}: tensor {name} is in another file too")
                self._file_of[name] = file
        self._unread.update(self._file_of)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open_files.close()

    def expect(self, name: str, *shape: int) -> None:
        """Raises ValueError naming a tensor that is missing or has another shape. Comes before any room is made: the
        sizes of config.json are only believed where a file has them too."""
        if name not in self._file_of:
            raise ValueError(f"the checkpoint lacks tensor {name}, of shape {list(shape)}")
        found = self._file_of[name].get_slice(name).get_shape()
        if found != list(shape):
            raise ValueError(f"tensor {name} has shape {found}; config.json asks for {list(shape)}")

    def copy(self, name: str, target: Tensor, parts: Sequence[Part]) -> None:
        """These parts of its dimensions; of the file, no more is read."""
        file = self._file_of[name]
        if all(part.size == part.of for part in parts):
            target.copy_(file.get_tensor(name))
        else:
            target.copy_(file.get_slice(name)[tuple(slice(part.first, part.end) for part in parts)])
        self._unread.discard(name)

    def largest(self, name: str) -> Tensor:
        """Of each row, the largest magnitude; reads all of it."""
        largest: Tensor = self._file_of[name].get_tensor(name).abs().amax(1)
        return largest

    def skip(self, prefix: str) -> None:
        """Nobody here asks for tensors whose names begin like this."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def finish(self, ignored: Sequence[str] = ()) -> None:
        """Raises ValueError if tensors are left that nobody asked for: config.json describes another model."""
        left = sorted(name for name in self._unread if name not in ignored and not name.endswith(_HARMLESS))
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ValueError(f"the checkpoint has tensors unknown to config.json: {', '.join(left[:5])}{more}")


def weight_files(folder: Path) -> list[Path]:
    """The files that the index names, else all *.safetensors. Raises ValueError if there are none or one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ValueError(f"{index}: weight_map must be an object of file names")
        paths = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"{folder}: missing weight files: {', '.join(missing) or '*.safetensors'}")
    return paths


def load_weights(
    folder: Path, config: ModelConfig, device: Device, share: Share = WHOLE_MODEL, comm: Comm | None = None
) -> Weights:
    """What is to be here of them. Raises ValueError naming a tensor that is missing, has another shape, or should not
    be there."""
    with Checkpoint(folder) as checkpoint:
        loader = _Loader(checkpoint, config, device, share, comm or Alone())
        stage = share.stage or stage_of(config, 0, 1)
        names = ("model.embed_tokens",) * 2 if config.tied else ("model.embed_tokens", "lm_head")
        here = {name for name, asked in zip(names, (stage.is_first, stage.is_last), strict=True) if asked}
        tables = {name: loader.vocabulary(name) if name in here else Elsewhere(config.vocab_size) for name in names}
        for index in {*range(config.num_layers)}.difference(range(stage.first, stage.end)):
            checkpoint.skip(f"model.layers.{index}.")
        layers = [_layer(loader, config, index) for index in range(stage.first, stage.end)]
        norm = loader.one("model.norm.weight", config.hidden_size)
        for name in set(names) - here:
            checkpoint.skip(name)
        checkpoint.finish(ignored=("lm_head.weight",) if config.tied else ())
    return Weights(embedding=tables[names[0]], layers=layers, norm_E=norm, head=tables[names[1]])


class _Loader:
    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, device: Device, share: Share, comm: Comm) -> None:
        self.share = share
        self._checkpoint = checkpoint
        self._config = config
        self._device = device
        self._comm = comm

    def one(self, name: str, *shape: int) -> Tensor:
        self._checkpoint.expect(name, *shape)
        target = self._device.empty(shape)
        self._checkpoint.copy(name, target, [whole(size) for size in shape])
        return target

    def linear(
        self, modules: Sequence[str], rows: Sequence[Part], columns: Part, *, bias: bool, gated: bool = False
    ) -> Linear:
        """Several modules under each other, so that one multiplication does the work of all. One alone where a rank has
        some of the columns."""
        weight = self._stacked(modules, "weight", rows, columns)
        biases = self._stacked(modules, "bias", rows) if bias else None
        largest_N = None
        if columns.size < columns.of and self._device.quantization == "int8":
            [module] = modules
            largest_N = self._checkpoint.largest(f"{module}.weight").to(weight)
        epsilon = self._config.norm_eps
        return make_linear(weight, biases, self._device, epsilon=epsilon, gated=gated, largest_N=largest_N)

    def adding(self, module: str, rows: int, columns: Part, *, bias: bool, mine: Part | None = None) -> Adding:
        if bias:
            self._checkpoint.expect(f"{module}.bias", rows)
            self._checkpoint.skip(f"{module}.bias")  # where another rank adds it
        layer = self.linear([module], [whole(rows)], columns, bias=bias and not self.share.width.rank)
        return layer if self.share.width.size == 1 else SplitInputs(layer, self._comm, mine)

    def vocabulary(self, module: str) -> Vocabulary:
        num_rows, hidden = self._config.vocab_size, whole(self._config.hidden_size)
        width = self.share.width
        layer = self.linear([module], [width.part(num_rows)], hidden, bias=False)
        return layer if width.size == 1 else SplitVocabulary(layer, num_rows, width, self._comm, self._device)

    def _stacked(self, modules: Sequence[str], kind: str, rows: Sequence[Part], *rest: Part) -> Tensor:
        for module, part in zip(modules, rows, strict=True):
            self._checkpoint.expect(f"{module}.{kind}", part.of, *(other.of for other in rest))
        sizes = [part.size for part in rows]
        target = self._device.empty((sum(sizes), *(part.size for part in rest)))
        for module, part, piece in zip(modules, rows, target.split(sizes), strict=True):
            self._checkpoint.copy(f"{module}.{kind}", piece, (part, *rest))
        return target


def _layer(loader: _Loader, config: ModelConfig, index: int) -> Layer:
    layer = f"model.layers.{index}"
    at, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    size, dim, share = config.hidden_size, config.head_dim, loader.share
    hidden, inner = whole(size), share.width.part(config.intermediate_size)
    heads, kv_heads = share.heads.part(config.num_heads).times(dim), share.heads.kv_heads(config).times(dim)
    attended, mine = heads, None
    if share.context.size > 1:
        mine = share.attended(config)
        attended = Part(heads.first + mine.first, heads.first + mine.end, heads.of)
    qkv, gate_up = [f"{at}.{part}_proj" for part in "qkv"], [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    return Layer(
        attention_norm_E=loader.one(f"{layer}.input_layernorm.weight", size),
        qkv=loader.linear(qkv, (heads, kv_heads, kv_heads), hidden, bias=config.qkv_bias),
        q_norm_D=loader.one(f"{at}.q_norm.weight", dim) if config.qk_norm else None,
        k_norm_D=loader.one(f"{at}.k_norm.weight", dim) if config.qk_norm else None,
        output=loader.adding(f"{at}.o_proj", size, attended, bias=config.output_bias, mine=mine),
        mlp_norm_E=loader.one(f"{layer}.post_attention_layernorm.weight", size),
        gate_up=loader.linear(gate_up, (inner, inner), hidden, bias=config.mlp_bias, gated=True),
        down=loader.adding(f"{mlp}.down_proj", size, inner, bias=config.mlp_bias),
    )


def model_digest(folder: Path, quantization: str = "none") -> str:
    """32 hex digits over config.json, every byte of the weights, and what is made of them when they are loaded.

    Every byte, because replicas with one digest exchange keys and values and continue each other's streams.
    blake2b takes about 1 s per GB and core, here in pieces of 8 MiB; the pages are read for loading anyway.
    """
    total = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=16, person=b"shoal-model")
    if quantization != "none":
        total.update(quantization.encode())
    with ThreadPoolExecutor(num_cores()) as pool:
        for path in weight_files(folder):
            total.update(f"{path.name}:{path.stat().st_size}".encode())
            for digest in pool.map(_piece_digest, _pieces(path)):
                total.update(digest)
    return total.hexdigest()


def _pieces(path: Path) -> Iterator[tuple[Path, int]]:
    return ((path, offset) for offset in range(0, path.stat().st_size, _DIGEST_PIECE_BYTES))


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    path, offset = piece
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.blake2b(file.read(_DIGEST_PIECE_BYTES), digest_size=16).digest()
