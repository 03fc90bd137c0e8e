"""Which ranks a replica has, and what each of them keeps of a dimension that is split."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from shoal.engine.config import EngineConfig
    from shoal.engine.model.config import ModelConfig

Axis = Literal["tp", "cp", "pp"]
AXES: tuple[Axis, ...] = ("tp", "cp", "pp")  # those that talk most are neighbours
MAX_RANKS = 64


class Place(NamedTuple):
    tp: int
    cp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """tp x cp x pp ranks: rank = (pp · CP + cp) · TP + tp. Rank 0 is the engine process."""

    tp: int = 1  # ranks that share each layer
    cp: int = 1  # ranks that share each context
    pp: int = 1  # ranks that share the layers

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
        """The ranks that differ from this one along one axis only, in order, itself included."""
        place = self.place(rank)
        return tuple(self.rank(place._replace(**{axis: index})) for index in range(getattr(self, axis)))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups along an axis, in one order for all ranks."""
        return sorted({self.group(rank, axis) for rank in range(self.size)})

    def check(self, model: ModelConfig) -> None:
        """Raises ValueError naming the values that fit."""
        if self.size > MAX_RANKS:
            raise ValueError(f"{self} makes {self.size} ranks; allowed: at most {MAX_RANKS}")
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
    return Layout(tp=config.tensor_parallel_size)


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

    def config(self, model: ModelConfig) -> ModelConfig:
        """Of what is here; the vocabulary stays whole."""
        return replace(
            model,
            num_heads=self.part(model.num_heads).size,
            num_kv_heads=self.kv_heads(model).size,
            intermediate_size=self.part(model.intermediate_size).size,
        )


UNSPLIT = Split(0, 1)
