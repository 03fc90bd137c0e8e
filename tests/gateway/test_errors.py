"""One table of reasons, one shape of errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shoal.core.request import Refusal
from shoal.fleet import stream
from shoal.gateway.errors import TABLE, ApiError, Reason


def test_every_reason_is_in_the_table_once() -> None:
    assert set(TABLE) == {*Reason, *Refusal}
    assert not {str(reason) for reason in Reason} & {str(refusal) for refusal in Refusal}


def test_every_reason_that_fleet_names_is_in_the_table() -> None:
    source = Path(str(stream.__file__)).read_text()
    named = set(re.findall(r'_fail\("(\w+)"', source)) | set(stream._ABNORMAL.values())
    assert named - {"cancelled"} <= set(TABLE)  # of a cancelled request nobody is told


@pytest.mark.parametrize("reason", TABLE)
def test_shape(reason: str) -> None:
    error = ApiError(reason, "why", param="field")
    assert json.loads(error.body()) == {
        "error": {"message": "why", "type": TABLE[reason].type, "param": "field", "code": str(reason)}
    }
    assert 400 <= error.shape.status < 600
    if error.shape.status in (429, 503):
        assert dict(error.shape.headers)["retry-after"].isdigit()


def test_a_generation_that_ran_out_of_time_is_not_sent_again_by_openais_client() -> None:
    assert ("x-should-retry", "false") in ApiError(Reason.TIMEOUT, "").shape.headers
