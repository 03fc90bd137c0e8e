"""How long will a step take? A linear model with non-negative coefficients, learned online.

    busy_ns ~ c0 + c1 * new tokens + c2 * attended tokens + c3 * sequences + c4 * sampled rows

The learner is a Kalman filter over the coefficients with a random walk (Jazwinski, Stochastic Processes and Filtering
Theory, 1970, ch. 7), with errors taken relative to the step, so that a decode of 5 ms counts as much as a prompt of
500 ms, and three guards:
  robust       the further an error lies beyond CLIP typical errors, the less it is believed (Huber's weight)
  bounded      uncertainty grows again where steps tell nothing, but never beyond what it was at the start
  non-negative a coefficient that would fall below zero stays at zero
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.plan import Slice

FEATURES: tuple[str, ...] = ("steps", "new_tokens", "attended_tokens", "sequences", "sampled_rows")

# Before anything was measured: of the order of a 100 M parameter model on two CPU cores, ns per unit of each feature.
DEFAULT_COEFFICIENTS = (2e6, 1e5, 10.0, 5e4, 5e4)

_UNITS = (1.0, 100.0, 50_000.0, 32.0, 32.0)  # a usual amount of each feature: brings the filter's numbers to one size
_NOISE = 0.05  # usual relative error of a step that the model describes well
_WALK = 1e-4  # share of the first uncertainty that comes back per step
_CLIP = 3.0
_ERROR_MIN, _ERROR_MAX = 0.02, 0.5  # bounds of the typical relative error

Features = tuple[int, ...]


class StepCost:
    def __init__(self, coefficients: Sequence[float] | None = None) -> None:
        """`coefficients`: ns per unit of each of FEATURES, see `fit`. ValueError: wrong count or negative."""
        given = tuple(DEFAULT_COEFFICIENTS if coefficients is None else coefficients)
        if len(given) != len(FEATURES) or not all(0 <= value < float("inf") for value in given):
            raise ValueError(f"coefficients must be {len(FEATURES)} non-negative numbers, not {given}")
        self.coefficients: tuple[float, ...] = given
        scaled = [value * unit for value, unit in zip(given, _UNITS, strict=True)]
        floor = 0.05 * sum(scaled) + 1e4
        self._first = [(0.5 * value + floor) ** 2 for value in scaled]
        self._covariance = [[v if i == j else 0.0 for j in range(len(given))] for i, v in enumerate(self._first)]
        self._error = 0.3  # typical relative error so far

    @staticmethod
    def features(slices: Iterable[Slice]) -> Features:
        """What the model sees of a step: one number per name in FEATURES."""
        new = attended = sequences = sampled = 0
        for part in slices:
            new += part.count
            attended += attended_tokens(part.start, part.count)
            sequences += 1
            sampled += part.sample
        return (1, new, attended, sequences, sampled)

    def predict(self, features: Features) -> int:
        """Nanoseconds."""
        c = self.coefficients
        f = features
        return int(c[0] * f[0] + c[1] * f[1] + c[2] * f[2] + c[3] * f[3] + c[4] * f[4])

    def update(self, features: Features, measured_ns: int) -> None:
        """Learns from one step. A measurement of 0 or less is no measurement."""
        if measured_ns <= 0:
            return
        predicted = self.predict(features)
        scale = 1.0 / max(measured_ns, predicted)
        error = (measured_ns - predicted) * scale  # in (-1, 1)
        limit = _CLIP * self._error
        weight = 1.0 if abs(error) <= limit else limit / abs(error)
        usual = 0.95 * self._error + 0.05 * 1.25 * weight * abs(error)
        self._error = min(_ERROR_MAX, max(_ERROR_MIN, usual))

        x = [value * scale / unit for value, unit in zip(features, _UNITS, strict=True)]
        rows = self._covariance
        px = [sum([p * v for p, v in zip(row, x, strict=True)]) for row in rows]
        gain = 1.0 / (sum([p * v for p, v in zip(px, x, strict=True)]) + _NOISE * _NOISE / weight)
        step = error * gain
        self.coefficients = tuple(
            [max(0.0, c + step * p / unit) for c, p, unit in zip(self.coefficients, px, _UNITS, strict=True)]
        )
        for i, (row, p) in enumerate(zip(rows, px, strict=True)):
            shrink = p * gain
            row[:] = [value - shrink * other for value, other in zip(row, px, strict=True)]
            row[i] = min(self._first[i], max(row[i], 0.0) + _WALK * self._first[i])


def attended_tokens(start: int, count: int) -> int:
    """Positions that the tokens [start, start + count) look at, themselves included, summed."""
    return count * start + count * (count + 1) // 2


def fit(samples: Sequence[tuple[Features, int]]) -> tuple[float, ...]:
    """Coefficients for a start-up sweep: least relative squares, non-negative, by coordinate descent.

    `samples`: (features, measured ns). Where the sweep says nothing about a feature, its default stays.
    """
    rows = [[value / ns for value in features] for features, ns in samples if ns > 0]
    result = list(DEFAULT_COEFFICIENTS)
    left = [1.0 - sum([c * v for c, v in zip(result, row, strict=True)]) for row in rows]
    for _ in range(200):
        for i in range(len(result)):
            square = sum([row[i] * row[i] for row in rows])
            if square == 0.0:
                continue
            better = max(0.0, result[i] + sum([e * row[i] for e, row in zip(left, rows, strict=True)]) / square)
            left = [e - (better - result[i]) * row[i] for e, row in zip(left, rows, strict=True)]
            result[i] = better
    return tuple(result)
