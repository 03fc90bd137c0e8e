"""The real small model, pulled once on a machine; parallel test processes wait for one pull."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shoal import models


@cache
def default_model() -> Path:
    return models.pull(models.DEFAULT)
