"""Inputs of a network: normalising, moving, and finding a shape if none is given."""

from __future__ import annotations

import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tconv_swap.input_search import InputShapeError, infer_inputs, try_modes
from tconv_swap.inputs import Inputs, random_inputs

Pair = namedtuple("Pair", "first second")


@dataclass
class Sample:
    image: Tensor
    label: int


def up(channels: int = 4) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(channels, 3, 4, stride=2, padding=1)


def head(features: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(features, 8), nn.Unflatten(1, (2, 2, 2)), up(2)]


class TestOf:
    def test_a_tensor_is_the_only_argument(self) -> None:
        x = torch.ones(2)
        assert Inputs.of(x).args == (x,)

    @pytest.mark.parametrize("container", [tuple, list])
    def test_a_sequence_is_the_positional_arguments(self, container: type) -> None:
        x = torch.ones(2)
        inputs = Inputs.of(container([x, 3]))
        assert inputs.args == (x, 3)
        assert inputs.kwargs == {}

    def test_a_dict_is_the_keyword_arguments(self) -> None:
        inputs = Inputs.of({"x": torch.ones(2), "scale": 3.0})
        assert inputs(lambda x, scale: x * scale).tolist() == [3.0, 3.0]

    def test_inputs_are_passed_through(self) -> None:
        inputs = Inputs((1,), {"a": 2})
        assert Inputs.of(inputs) is inputs

    @pytest.mark.parametrize("wrong", [None, 3, "text", {1: torch.ones(1)}])
    def test_anything_else_is_a_type_error(self, wrong: Any) -> None:
        with pytest.raises(TypeError):
            Inputs.of(wrong)


class TestTo:
    def test_only_floating_point_tensors_change_dtype(self) -> None:
        moved = Inputs.of((torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)))
        dtypes = [tensor.dtype for _, tensor in moved.to(dtype=torch.float16).named_tensors()]
        assert dtypes == [torch.float16, torch.int64, torch.bool]

    def test_only_4d_tensors_change_memory_format(self) -> None:
        inputs = Inputs.of((torch.ones(2, 3, 4, 5), torch.ones(2, 3)))
        image, vector = inputs.to(memory_format=torch.channels_last).args
        assert image.is_contiguous(memory_format=torch.channels_last)
        assert not image.is_contiguous()
        assert vector.is_contiguous()

    def test_reaches_every_nesting_and_keeps_the_containers(self) -> None:
        x = torch.ones(1)
        nested = {
            "a": [x, (x, 1)],
            "b": Pair(x, "text"),
            "c": Sample(x, 7),
            "d": OrderedDict(k=x),
        }
        moved = Inputs.of(nested).to(dtype=torch.float64)
        assert [tensor.dtype for _, tensor in moved.named_tensors()] == [torch.float64] * 5
        assert moved.kwargs["b"] == Pair(x, "text")
        assert moved.kwargs["c"] == Sample(x, 7)
        assert type(moved.kwargs["d"]) is OrderedDict
        assert x.dtype == torch.float32


def test_names_and_description() -> None:
    inputs = Inputs((torch.ones(2, 3), [torch.ones(1)]), {"mask": torch.ones(4, dtype=torch.bool)})
    assert [name for name, _ in inputs.named_tensors()] == ["0", "1.0", "mask"]
    assert inputs.describe() == "0 2x3 float32, 1.0 1 float32, mask 4 bool"
    assert Inputs.of(torch.ones(2, 3)).describe() == "2x3 float32"


class TestRandomInputs:
    def test_the_seed_decides_and_the_global_state_stays(self) -> None:
        before = torch.get_rng_state()
        first, again, other = (random_inputs([(2, 3)], seed=seed).args[0] for seed in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), before)

    def test_several_shapes_differ_in_their_numbers(self) -> None:
        first, second = random_inputs([(2, 3), (2, 3)]).args
        assert not torch.equal(first, second)

    def test_dtype_of_the_model(self) -> None:
        assert random_inputs([(1, 4, 2, 2)], up().double()).args[0].dtype == torch.float64


class Unet(nn.Module):
    """Registers its up-convolution first, and needs an input of a multiple of four pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)
        self.down = nn.Conv2d(3, 8, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


class TwoArguments(nn.Module):
    def forward(self, image: Tensor, label: Tensor, scale: float = 1.0) -> Tensor:
        return image


class Optional(nn.Module):
    """Reaches its second layer only for large images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = up()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if x.shape[-1] >= 224 else y


class OneSample(nn.Module):
    """Takes a batch of one only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x.view(4, 1, 1))


class Resting(nn.Module):
    """Registers a layer for latent vectors first, which does not read the input; an image is halved `depth` times."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.late = nn.ConvTranspose2d(4, 4, 1)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.depth = depth
        self.up = up(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(self.depth):
            y = nn.functional.avg_pool2d(y, 2, ceil_mode=True)
        return self.late(y).mean() + self.up(y)


class TestSizes:
    """Images of 64 to 256 pixels are tried before one pixel."""

    @pytest.mark.parametrize(
        ("model", "shape"),
        [
            (Resting(0), (2, 4, 64, 64)),
            # In the middle of this network, an image of 64 pixels would be one pixel.
            (Resting(6), (2, 4, 128, 128)),
            (Resting(7), (2, 4, 256, 256)),
            # It is one pixel for every image size: no image larger than 256 is tried for this.
            (Resting(9), (2, 4, 64, 64)),
            # An input with 1 or 3 channels is an image, even if a stride of 1 suggests latent vectors.
            (nn.Sequential(nn.ConvTranspose2d(3, 4, 4)), (2, 3, 64, 64)),
            (nn.Sequential(nn.ConvTranspose2d(1, 4, 4, 2, 1)), (2, 1, 64, 64)),
            # The shape that a generator is made for is taken as well.
            (nn.Sequential(nn.ConvTranspose2d(100, 4, 4)), (2, 100, 1, 1)),
        ],
    )
    def test_the_first_shape_with_more_than_one_pixel_is_taken(
        self, model: nn.Module, shape: tuple[int, ...]
    ) -> None:
        assert infer_inputs(model).inputs.args[0].shape == shape

    def test_shapes_that_did_not_run_are_named(self) -> None:
        found = infer_inputs(nn.Sequential(nn.Conv2d(1, 4, 2, 2), *head(784)))
        assert found.inputs.args[0].shape == (2, 1, 28, 28)
        assert found.how == "inferred from 0 (Conv2d); 2x1x64x64 and 4 more did not run"

    def test_the_layer_that_reads_the_input_is_named(self) -> None:
        assert infer_inputs(Resting(0)).how == "inferred from first (Conv2d)"


class TestInference:
    @pytest.mark.parametrize(
        ("model", "shape"),
        [
            (nn.Sequential(nn.ConvTranspose2d(10, 4, 4), nn.BatchNorm2d(4), up()), (2, 10, 1, 1)),
            # BatchNorm directly behind the latent vector wants two samples to train.
            (nn.Sequential(nn.BatchNorm2d(10), nn.ConvTranspose2d(10, 4, 4)), (2, 10, 64, 64)),
            (up(), (2, 4, 16, 16)),
            (nn.Sequential(nn.Linear(6, 4 * 9), nn.Unflatten(1, (4, 3, 3)), up()), (2, 6)),
            (nn.Sequential(nn.Embedding(5, 8), nn.Unflatten(1, (2, 2, 2)), up(2)), (2,)),
            (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4), up()), (2, 3, 64, 64)),
            # This head fits 28 x 28 only.
            (nn.Sequential(nn.Conv2d(1, 4, 2, 2), *head(784)), (2, 1, 28, 28)),
            (Unet(), (2, 3, 64, 64)),
            (OneSample(), (1, 4, 1, 1)),
            (Optional(), (2, 3, 256, 256)),
            (nn.Sequential(up(), nn.Conv2d(3, 3, 9)).double(), (2, 4, 16, 16)),
        ],
        ids=lambda value: "" if isinstance(value, tuple) else type(value).__name__,
    )  # fmt: skip
    def test_finds_a_shape(self, model: nn.Module, shape: tuple[int, ...]) -> None:
        found = infer_inputs(model)
        assert found.inputs.args[0].shape == shape
        assert found.how.startswith("inferred from ")

    def test_embeddings_get_valid_integers(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 8), nn.Unflatten(1, (2, 2, 2)), up(2))
        numbers = infer_inputs(model).inputs.args[0]
        assert numbers.dtype == torch.int64
        assert numbers.max() < 5

    def test_says_which_layer_it_came_from(self) -> None:
        assert infer_inputs(nn.Sequential(nn.ReLU(), up())).how == "inferred from 1 (ConvTranspose2d)"

    def test_takes_the_best_shape_and_says_what_it_does_not_reach(self) -> None:
        model = Optional()
        model.never = up()
        found = infer_inputs(model)
        assert found.inputs.args[0].shape[-1] in (224, 256)
        assert "reaches 1 of 2 transposed convolutions" in found.how

    def test_restores_the_model_and_the_random_state(self) -> None:
        model = nn.Sequential(nn.Dropout(), nn.ConvTranspose2d(4, 4, 4), nn.BatchNorm2d(4))
        model[0].eval()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        modes = [module.training for module in model.modules()]
        torch_state, python_state = torch.get_rng_state(), random.getstate()
        infer_inputs(model)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert random.getstate() == python_state
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_several_arguments_have_to_be_given(self) -> None:
        with pytest.raises(InputShapeError, match=r"2 arguments \(image, label\).*--input-shape"):
            infer_inputs(TwoArguments())

    def test_no_layer_determines_the_shape(self) -> None:
        with pytest.raises(InputShapeError, match=r"no layer determines it.*--input-shape"):
            infer_inputs(nn.ReLU())

    def test_no_shape_runs(self) -> None:
        broken = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))
        with pytest.raises(InputShapeError, match=r"none of the 8 shapes tried runs \(.*2x4 and 5x6"):
            infer_inputs(broken)

    def test_the_time_limit_ends_the_search(self) -> None:
        with pytest.raises(InputShapeError):
            infer_inputs(up(), time_limit=-1.0)


class TrainOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = up()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise ValueError("only trains\nand nothing else")
        return self.up(x)


def test_a_network_that_runs_only_in_train_mode_gets_a_shape() -> None:
    assert infer_inputs(TrainOnly()).inputs.args[0].shape == (2, 4, 16, 16)


def test_try_modes_returns_errors_and_reached_modules() -> None:
    model = TrainOnly()
    evaluated, trained = try_modes(model, Inputs.of(torch.ones(1, 4, 2, 2)))
    assert (evaluated.mode, evaluated.error) == ("eval", "ValueError: only trains")
    assert (trained.mode, trained.error) == ("train", "")
    assert model.up not in evaluated.reached
    assert model.up in trained.reached
