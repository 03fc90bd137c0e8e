"""How long will a step take? A linear model with non-negative coefficients, learned online.

    busy_ns ~ c0 + c1 * new tokens + c2 * attended tokens + c3 * sequences + c4 * context tokens

Attended tokens are pairs of a new token and one that it looks at: what attention computes. Context tokens are those
whose keys and values are read: what attention fetches, at ten times the cost of a pair. For a decode both are its
length; for a chunk of n tokens at the beginning of a prompt the first is n / 2 times the second.

Two things are learned from each step. The speed of the whole machine, which changes with its clock and its neighbours
from one step to the next: a factor to all coefficients. And the coefficients, slowly, by a Kalman filter (Jazwinski,
Stochastic Processes and Filtering Theory, 1970, ch. 7), with errors relative to the step, so that a decode of 5 ms
counts as much as a prompt of 500 ms. Its guards:
  robust       the further an error lies beyond CLIP typical errors, the less it is believed (Huber's weight)
  excited      uncertainty comes back only as far as steps differ from the usual ones, and never beyond what it was at
               the start: an hour of like steps moves the speed and leaves alone what is known of other steps
  non-negative a coefficient that would fall below zero stays at zero
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt

from shoal.core.plan import Slice

FEATURES: tuple[str, ...] = ("steps", "new_tokens", "attended_tokens", "sequences", "context_tokens")

# Before anything was measured: of the order of a 100 M parameter model on two CPU cores, ns per unit of each feature.
DEFAULT_COEFFICIENTS = (1e7, 1.5e5, 100.0, 3e4, 1.3e3)

_UNITS = (1.0, 100.0, 50_000.0, 32.0, 5000.0)  # a usual amount of each feature: brings the filter's numbers to one size
_NOISE = 0.07  # usual relative error of a step that the model describes well
_SPEED = 0.05  # how uncertain the machine's speed is before each step
_WALK = 2e-4  # share of the first uncertainty that comes back with a step that is wholly unlike the usual
_USUAL = 0.01  # weight of the newest step in what is usual
_CLIP = 3.0
_ERROR_MIN, _ERROR_MAX = 0.02, 0.5  # bounds of the typical relative error

Features = tuple[int, ...]


class StepCost:
    def __init__(self, coefficients: Sequence[float] | None = None) -> None:
        """`coefficients`: ns per unit of each of FEATURES, see `fit`. ValueError: wrong count or negative."""
        given = tuple(DEFAULT_COEFFICIENTS if coefficients is None else coefficients)
        if len(given) != len(FEATURES) or not all(0 <= value < float("inf") for value in given):
            raise ValueError(f"coefficients must be {len(FEATURES)} non-negative numbers, not {given}")
        self.coefficients: tuple[float, ...] = given  # as they are at the present speed
        self._speed = 1.0
        self._at_start_speed = list(given)
        self._usual: list[float] | None = None  # share of each feature in a step's time
        self._first = _uncertainty(given)
        self._covariance = [[v if i == j else 0.0 for j in range(len(given))] for i, v in enumerate(self._first)]
        self._error = 0.3  # typical relative error so far

    @staticmethod
    def features(slices: Iterable[Slice]) -> Features:
        """What the model sees of a step: one number per name in FEATURES. All but the first add up over its slices."""
        new = attended = sequences = context = 0
        for part in slices:
            new += part.count
            attended += attended_tokens(part.start, part.count)
            sequences += 1
            context += part.start + part.count
        return (1, new, attended, sequences, context)

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
        noise = _NOISE * _NOISE / self._belief(error)

        x = [value * self._speed * scale / unit for value, unit in zip(features, _UNITS, strict=True)]
        px = [sum([p * v for p, v in zip(row, x, strict=True)]) for row in self._covariance]
        gain = 1.0 / (sum([p * v for p, v in zip(px, x, strict=True)]) + _SPEED * _SPEED + noise)
        step = error * gain
        self._speed *= 1.0 + step * _SPEED * _SPEED * predicted * scale
        self._at_start_speed = [
            max(0.0, c + step * p / unit) for c, p, unit in zip(self._at_start_speed, px, _UNITS, strict=True)
        ]
        self.coefficients = tuple([self._speed * c for c in self._at_start_speed])
        self._settle(px, gain, _WALK * self._unlike(features))

    def _belief(self, error: float) -> float:
        """Weight of an error, 1 where it is a usual one."""
        limit = _CLIP * self._error
        weight = 1.0 if abs(error) <= limit else limit / abs(error)
        usual = 0.95 * self._error + 0.05 * 1.25 * weight * abs(error)
        self._error = min(_ERROR_MAX, max(_ERROR_MIN, usual))
        return weight

    def _unlike(self, features: Features) -> float:
        """From 0 to 2: how unlike the usual steps this one is in what takes its time."""
        parts = [c * f for c, f in zip(self.coefficients, features, strict=True)]
        whole = sum(parts) or 1.0
        shares = [part / whole for part in parts]
        usual = self._usual or shares
        self._usual = [u + _USUAL * (share - u) for u, share in zip(usual, shares, strict=True)]
        return sum([(share - u) ** 2 for u, share in zip(usual, shares, strict=True)])

    def _settle(self, px: list[float], gain: float, walk: float) -> None:
        """The covariance after a step that told (px, gain), with `walk` of the first uncertainty added."""
        rows, first = self._covariance, self._first
        for i, (row, p) in enumerate(zip(rows, px, strict=True)):
            told = p * gain
            row[:] = [v - told * other for v, other in zip(row, px, strict=True)]
            row[i] = max(row[i], 0.0) + walk * first[i]
        for i, most in enumerate(first):
            if rows[i][i] > most:  # less of this coefficient in row and column: what is left is a covariance still
                shrink = sqrt(most / rows[i][i])
                rows[i] = [value * shrink for value in rows[i]]
                for row in rows:
                    row[i] *= shrink


def attended_tokens(start: int, count: int) -> int:
    """Positions that the tokens [start, start + count) look at, themselves included, summed."""
    return count * start + count * (count + 1) // 2


def fit(samples: Sequence[tuple[Features, int]]) -> tuple[float, ...]:
    """Coefficients for a start-up sweep: least relative squares, non-negative, by coordinate descent.

    `samples`: (features, measured ns). Errors beyond a usual one count less, as in `StepCost.update`, and what the
    sweep does not tell stays as the defaults have it, for a machine as much faster or slower as the median sample says.
    """
    rows = [[value / ns for value in features] for features, ns in samples if ns > 0]
    if not rows:
        return DEFAULT_COEFFICIENTS
    slower = sorted([1.0 / _dot(DEFAULT_COEFFICIENTS, row) for row in rows])[len(rows) // 2]
    prior = [slower * value for value in DEFAULT_COEFFICIENTS]
    holds = [_NOISE**2 / variance * unit * unit for variance, unit in zip(_uncertainty(prior), _UNITS, strict=True)]
    result = list(prior)
    for _ in range(10):
        left = [1.0 - _dot(result, row) for row in rows]
        weights = [min(1.0, 2 * _NOISE / max(abs(error), 1e-9)) for error in left]
        for _ in range(40):
            for i in range(len(result)):
                gradient = sum([w * e * row[i] for w, e, row in zip(weights, left, rows, strict=True)])
                gradient += holds[i] * (prior[i] - result[i])
                square = sum([w * row[i] * row[i] for w, row in zip(weights, rows, strict=True)]) + holds[i]
                better = max(0.0, result[i] + gradient / square)
                left = [e - (better - result[i]) * row[i] for e, row in zip(left, rows, strict=True)]
                result[i] = better
    return tuple(result)


def _dot(coefficients: Sequence[float], row: Sequence[float]) -> float:
    return sum([c * v for c, v in zip(coefficients, row, strict=True)])


def _uncertainty(coefficients: Sequence[float]) -> list[float]:
    """Variance of each coefficient, times its unit, before a step was measured."""
    scaled = [value * unit for value, unit in zip(coefficients, _UNITS, strict=True)]
    floor = 0.05 * sum(scaled) + 1e4
    return [(0.5 * value + floor) ** 2 for value in scaled]
