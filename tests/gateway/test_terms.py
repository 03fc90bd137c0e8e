"""Which class and targets a request gets. Whatever it says, it gets no more than its key was granted."""

from __future__ import annotations

import itertools
import random

import pytest

from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.gateway.auth import Grant
from shoal.gateway.errors import ApiError
from shoal.gateway.terms import Terms, granted, terms_of

CLASSES = {
    **DEFAULT_CLASSES,
    "interactive": ServiceClass(rank=0, ttft_ms=1000.0, tpot_ms=100.0),
    "batch": ServiceClass(rank=2),
    "gold": ServiceClass(rank=0, ttft_ms=200.0, tpot_ms=20.0),
}
MIN32, MAX32 = -(1 << 31), (1 << 31) - 1


def terms(*classes: str, priority: int = 0, tenant: str = "", **headers: str) -> Terms:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return terms_of(raw, priority, Grant(tenant=tenant, classes=classes), CLASSES)


def refused(*classes: str, priority: int = 0, **headers: str) -> tuple[int, str, str | None]:
    with pytest.raises(ApiError) as caught:
        terms(*classes, priority=priority, **headers)
    return caught.value.shape.status, str(caught.value.reason), caught.value.param


@pytest.mark.parametrize(
    ("classes", "header", "priority", "expected"),
    [
        ((), None, 0, "standard"),  # a key from the environment, or none at all
        ((), None, -1, "interactive"),
        ((), None, 1, "batch"),
        ((), "gold", 0, "gold"),
        (("batch", "standard"), None, 0, "batch"),  # the first that was granted is the default
        (("batch", "standard"), None, -5, "standard"),
        (("batch", "standard"), None, 5, "batch"),
        (("gold", "interactive"), None, -1, "gold"),  # equal ranks: the one granted first
        (("interactive", "gold"), None, -1, "interactive"),
        (("standard",), None, MIN32, "standard"),
        (("standard",), None, MAX32, "standard"),
        (("standard", "batch"), "batch", MIN32, "batch"),  # the header wins over the number
    ],
)
def test_the_class_by_name_or_by_urgency(
    classes: tuple[str, ...], header: str | None, priority: int, expected: str
) -> None:
    headers = {} if header is None else {"x_shoal_class": header}
    assert terms(*classes, priority=priority, **headers).service_class == expected


def test_a_class_that_was_not_granted_is_403_and_names_those_that_were() -> None:
    assert refused("standard", "batch", x_shoal_class="interactive") == (403, "class_not_granted", "x-shoal-class")
    with pytest.raises(ApiError, match="it has standard, batch"):
        terms("standard", "batch", x_shoal_class="gold")


@pytest.mark.parametrize(
    "name", ["platinum", "Interactive", "", "batch,interactive", "batch, batch", "batch\x00", "../batch", "é" * 5000]
)
def test_an_unknown_class_is_400(name: str) -> None:
    assert refused(x_shoal_class=name) == (400, "unknown_class", "x-shoal-class")


@pytest.mark.parametrize(
    ("asked", "ttft_ms"),
    [("2000", 2000.0), ("1000.5", 1000.5), ("1000", 1000.0), ("1", 1000.0), ("0", 1000.0), ("999999999", 999999999.0)],
)
def test_targets_may_be_loosened_and_not_tightened(asked: str, ttft_ms: float) -> None:
    got = terms("interactive", x_slo_ttft_ms=asked)
    assert (got.ttft_ms, got.tpot_ms) == (ttft_ms, CLASSES["interactive"].tpot_ms)


def test_where_a_class_has_no_target_there_is_nothing_to_loosen() -> None:
    assert terms("batch", x_slo_ttft_ms="5", x_slo_tpot_ms="5") == Terms(service_class="batch")


@pytest.mark.parametrize("header", ["x_slo_ttft_ms", "x_slo_tpot_ms"])
@pytest.mark.parametrize(
    "asked", ["", "-1", "+1", "nan", "inf", "1e9", "0x10", "1_000", "1,5", " 5", "1.", ".5", "²", "9" * 10, "9" * 9999]
)
def test_a_target_that_is_no_number_is_400(header: str, asked: str) -> None:
    assert refused(**{header: asked}) == (400, "invalid_request", header.replace("_", "-"))


@pytest.mark.parametrize("name", [b"x-shoal-class", b"x-slo-ttft-ms", b"x-slo-tpot-ms"])
def test_a_header_that_comes_twice_is_400_whatever_it_says(name: bytes) -> None:
    for values in ((b"batch", b"batch"), (b"5", b"5"), (b"batch", b"interactive")):
        with pytest.raises(ApiError, match="there 2 times") as caught:
            terms_of([(name, value) for value in values], 0, Grant(), CLASSES)
        assert caught.value.shape.status == 400


def test_a_tenant_of_the_key_file_may_only_put_its_requests_back() -> None:
    assert [Terms(tenant="a").order(priority) for priority in (MIN32, -1, 0, 1, MAX32)] == [0, 0, 0, 1, MAX32]
    assert [Terms().order(priority) for priority in (MIN32, 0, 3)] == [MIN32, 0, 3]


def test_whatever_is_sent_gets_no_more_than_what_was_granted() -> None:
    chance = random.Random(1)
    names = [*CLASSES, "platinum", "", "standard,gold"]
    numbers = ["0", "1", "150", "5000", "-1", "x"]
    subsets = [held for size in range(1, 5) for held in itertools.permutations(CLASSES, size)]
    num_served = 0
    for _ in range(3000):
        grant = Grant(tenant="t", classes=chance.choice(subsets))
        headers = [
            (name, chance.choice(values).encode())
            for name, values in (
                (b"x-shoal-class", names),
                (b"x-slo-ttft-ms", numbers),
                (b"x-slo-tpot-ms", numbers),
                (b"x-tenant-id", ["", "other"]),
                (b"x-shoal-tenant", ["other"]),
            )
            if chance.random() < 0.5
        ]
        try:
            got = terms_of(headers, chance.choice([MIN32, -1, 0, 1, MAX32]), grant, CLASSES)
        except ApiError:
            continue
        num_served += 1
        promised = CLASSES[got.service_class]
        assert got.tenant == "t" and got.service_class in granted(grant, CLASSES)
        assert got.ttft_ms >= promised.ttft_ms and got.tpot_ms >= promised.tpot_ms
        assert promised.ttft_ms or not got.ttft_ms
    assert num_served > 500
