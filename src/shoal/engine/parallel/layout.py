"""Which ranks a replica has, and what each of them keeps of a dimension that is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shoal.planner.layouts import equal_stages

if TYPE_CHECKING:
    from shoal.engine.config import EngineConfig
    from shoal.engine.model.config import ModelConfig

Axis = Literal["layer", "cp", "pp"]
AXES: tuple[Axis, ...] = ("layer", "cp", "pp")  # "layer": tp and cp at once
MAX_RANKS = 64


class Place(NamedTuple):
    tp: int
    cp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """tp x cp x pp ranks: rank = (pp · CP + cp) · TP + tp. Rank 0 is the engine process.

    tp ranks share the heads of each layer, cp ranks each context, and all tp x cp of them what else is in a layer (as
    in Helix, arXiv:2507.07120). pp groups of ranks share the layers: each group is a stage.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.pp

    def __str__(self) -> str:
        return f"tp={self.tp} cp={self.cp} pp={self.pp}"

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What an engine that is several processes tells whom it greets."""
        return tuple(f"{axis}={size}" for axis, size in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp)) if size > 1)

    def place(self, rank: int) -> Place:
        return Place(rank % self.tp, rank // self.tp % self.cp, rank // self.tp // self.cp)

    def rank(self, place: Place) -> int:
        return (place.pp * self.cp + place.cp) * self.tp + place.tp

    def group(self, rank: int, axis: Axis) -> tuple[int, ...]:
        """The ranks that differ from this one along an axis only, in order, itself included."""
        place = self.place(rank)
        if axis == "layer":
            first = self.rank(Place(0, 0, place.pp))
            return tuple(range(first, first + self.tp * self.cp))
        return tuple(self.rank(place._replace(**{axis: index})) for index in range(getattr(self, axis)))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups along an axis, in one order for all ranks."""
        return sorted({self.group(rank, axis) for rank in range(self.size)})

    def check(self, model: ModelConfig) -> None:
        """Raises ValueError naming the values that fit."""
        if self.size > MAX_RANKS:
            raise ValueError(f"{self} makes {self.size} ranks; allowed: at most {MAX_RANKS}")
        if self.pp > model.num_layers:
            raise ValueError(
                f"engine.pipeline_parallel_size is {self.pp}; the model has {model.num_layers} layers: allowed: as many"
            )
        heads, kv_heads = model.num_heads, model.num_kv_heads
        fits = [
            tp
            for tp in range(1, heads + 1)
            if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and tp <= model.intermediate_size
        ]
        if self.tp not in fits:
            raise ValueError(
                f"engine.tensor_parallel_size is {self.tp}; the model has {heads} query heads and {kv_heads} key/value "
                f"heads: allowed: {', '.join(map(str, fits))}"
            )


def layout_of(config: EngineConfig) -> Layout:
    return Layout(config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size)


class Part(NamedTuple):
    """[first, end) of a dimension of size `of`."""

    first: int
    end: int
    of: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def times(self, unit: int) -> Part:
        return Part(self.first * unit, self.end * unit, self.of * unit)


def whole(size: int) -> Part:
    return Part(0, size, size)


class Split(NamedTuple):
    """What one of `size` tensor-parallel ranks keeps of a model."""

    rank: int
    size: int

    def part(self, of: int, rank: int | None = None) -> Part:
        """Equal parts, but for one where `of` is no multiple."""
        rank = self.rank if rank is None else rank
        return Part(of * rank // self.size, of * (rank + 1) // self.size, of)

    def kv_heads(self, model: ModelConfig) -> Part:
        """Where there are fewer heads than ranks, several keep the same one."""
        if model.num_kv_heads >= self.size:
            return self.part(model.num_kv_heads)
        head = self.rank * model.num_kv_heads // self.size
        return Part(head, head + 1, model.num_kv_heads)


UNSPLIT = Split(0, 1)


class Stage(NamedTuple):
    """Layers [first, end) of a model, those of one stage of `of`."""

    index: int  # type: ignore[assignment]  # hides tuple.index
    of: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.of - 1


def stage_of(model: ModelConfig, index: int, of: int) -> Stage:
    """Stages that take alike long for tokens that are decoded: the output matrix counts as much as it is large, and the
    embedding, of which a row is looked up, nothing."""
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    layer = model.hidden_size * (2 * (heads + kv_heads) * dim + 3 * model.intermediate_size)
    mine = equal_stages(model.num_layers, layer, model.hidden_size * model.vocab_size, of)[index]
    return Stage(index, of, mine.start, mine.stop)


class Share(NamedTuple):
    """What one of a replica's ranks keeps of a model."""

    heads: Split = UNSPLIT
    context: Split = UNSPLIT
    stage: Stage | None = None  # None: all layers

    @property
    def width(self) -> Split:
        """Of what else is in a layer, and the vocabulary."""
        return Split(self.context.rank * self.heads.size + self.heads.rank, self.context.size * self.heads.size)

    def attended(self, model: ModelConfig) -> Part:
        """Of the attention's result, over this rank's heads, the values that this rank goes on with."""
        return self.context.part(self.heads.part(model.num_heads).size * model.head_dim)

    def config(self, model: ModelConfig) -> ModelConfig:
        """Of what is here; the vocabulary stays whole."""
        return replace(
            model,
            num_layers=model.num_layers if self.stage is None else self.stage.end - self.stage.first,
            num_heads=self.heads.part(model.num_heads).size,
            num_kv_heads=self.heads.kv_heads(model).size,
            intermediate_size=self.width.part(model.intermediate_size).size,
        )


WHOLE_MODEL = Share()
