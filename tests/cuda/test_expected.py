"""Which layers are expected behind another one."""

from __future__ import annotations

import pytest

from tconv_swap.cuda import expected
from tconv_swap.cuda.expected import ExpectedLayer, expect, followers
from tconv_swap.geometry import Geometry


def layer(in_channels: int, out_channels: int, has_bias: bool = True) -> ExpectedLayer:
    return ExpectedLayer(Geometry(1, in_channels, 1, 1, out_channels, (4, 4), (2, 2), (1, 1)), has_bias)


def sized(one: ExpectedLayer, batch: int, height: int, width: int) -> ExpectedLayer:
    return one._replace(geometry=one.geometry._replace(batch=batch, height=height, width=width))


@pytest.fixture(autouse=True)
def _nothing_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "_layers", {})


def test_layers_follow_by_their_channels_whatever_their_order() -> None:
    layers = [layer(64, 3, has_bias=False), layer(128, 64), layer(256, 128), layer(7, 5)]
    expect(layers)
    assert followers(sized(layers[2], 8, 5, 6)) == [sized(layers[1], 8, 10, 12), sized(layers[0], 8, 20, 24)]
    assert followers(sized(layers[1], 1, 5, 6)) == [sized(layers[0], 1, 10, 12)]


def test_a_layer_may_take_the_features_of_an_encoder_too() -> None:
    layers = [layer(512, 256), layer(512, 128), layer(257, 8)]
    expect(layers)
    assert followers(sized(layers[0], 1, 4, 4)) == [sized(layers[1], 1, 8, 8)]


def test_a_size_that_no_layer_has_is_not_guessed() -> None:
    layers = [layer(64, 48), layer(48, 32)]
    without_output = layers[1]._replace(geometry=layers[1].geometry._replace(padding=(99, 99)))
    expect([*layers, without_output])
    assert followers(sized(layers[0], 64, 512, 512)) == []  # 64 x 48 x 1024 x 1024
    assert followers(sized(layers[0], 1, 4, 4)) == [sized(layers[1], 1, 8, 8)]


def test_layers_in_a_circle_are_found_once() -> None:
    layers = [layer(64, 64), layer(64, 32), layer(32, 64)]
    expect([*layers, *layers])
    assert followers(sized(layers[0], 1, 4, 4)) == [sized(layers[1], 1, 8, 8), sized(layers[2], 1, 16, 16)]
    assert followers(sized(layers[1], 1, 4, 4)) == [sized(layers[0], 1, 8, 8), sized(layers[2], 1, 8, 8)]


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "MAX_LAYERS", 3)
    expect(layer(1, channels) for channels in range(5))
    assert [one.geometry.out_channels for one in expected._layers] == [2, 3, 4]
