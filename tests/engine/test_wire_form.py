"""Blocks in the KV store and as they cross a network are the same bytes, whole or some layers at a time."""

from __future__ import annotations

import pytest
import torch

from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.kvstore import KVStore
from shoal.engine.transfer.host import HostBlocks
from shoal.engine.transfer.wire_form import WireForm
from tests.support.kvstore import random_store

pytestmark = pytest.mark.torch


@pytest.fixture
def store() -> KVStore:
    return random_store("bfloat16")


@pytest.fixture
def form(store: KVStore) -> WireForm:
    return WireForm(store, choose(EngineConfig(threads=1)))


def test_a_block_goes_elsewhere_whole_or_in_layers(store: KVStore, form: WireForm) -> None:
    assert (form.num_layers, form.block_bytes) == (3, store.bytes_NBX[:, 0].numel())
    before = store.bytes_NBX.clone()
    layer_bytes = form.block_bytes // 3
    outside = memoryview(bytearray(form.block_bytes))
    form.take(7, 0, outside[:layer_bytes])
    form.take(7, 1, outside[layer_bytes:])
    assert torch.equal(store.bytes_NBX, before)
    form.put(2, 0, outside)
    form.put(3, 1, outside[layer_bytes : 2 * layer_bytes])
    expected = before.clone()
    expected[:, 2] = before[:, 7]
    expected[1, 3] = before[1, 7]
    assert torch.equal(store.bytes_NBX, expected)


def test_it_is_the_form_of_the_host_tier(store: KVStore, form: WireForm) -> None:
    host = HostBlocks(store, choose(EngineConfig(threads=1)), 2)
    host.copy(out=True, device_block=5, host_block=1, count=1)
    outside = bytearray(form.block_bytes)
    form.take(5, 0, memoryview(outside))
    assert host._host_HNX[1].numpy().tobytes() == outside


@pytest.mark.parametrize(
    ("block", "first_layer", "num_layers"), [(12, 0, 1), (-1, 0, 1), (0, 3, 1), (0, -1, 1), (0, 1, 3)]
)
def test_what_does_not_exist_is_noticed(form: WireForm, block: int, first_layer: int, num_layers: int) -> None:
    piece = memoryview(bytearray(form.block_bytes // 3 * num_layers))
    for copy in (form.take, form.put):
        with pytest.raises(AssertionError):
            copy(block, first_layer, piece)
