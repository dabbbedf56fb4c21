"""Nothing in an output is dropped from the comparison: it is compared, or a note says that it is not."""

from __future__ import annotations

import collections
import datetime
import functools
import math
import sys
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from verify_cases import ScaleGradient, compare_outputs, swapped_copy

from tconv_swap.verification import verify
from tconv_swap.verification.tree import flatten


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Slots:
    __slots__ = ("__private", "given", "unset")

    def __init__(self, given: Any) -> None:
        self.given = self.__private = given


class Named(dict):  # type: ignore[type-arg]
    """A dict with attributes."""

    def __init__(self, held: dict[str, Any], also: Any) -> None:
        super().__init__(held)
        self.also = also


class Called:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> Any:
        return self.held


class Raises:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not now")

    __hash__ = None  # type: ignore[assignment]


class Elementwise:
    def __eq__(self, other: object) -> Any:
        return [True, False]

    __hash__ = None  # type: ignore[assignment]


def array(y: Tensor) -> Any:
    return y.detach().numpy()


def objects(y: Tensor) -> Any:
    held = np.empty(2, dtype=object)
    held[0] = y
    return held


def masked(y: Tensor, hidden: int) -> Any:
    return np.ma.MaskedArray(np.ones(3), mask=np.arange(3) == hidden)


def itself(y: Tensor) -> list[Any]:
    held: list[Any] = [y]
    held.append(held)
    return held


def structured(number: int, name: str) -> Any:
    return np.array([(number, name)], dtype=[("number", "i4"), ("name", "U4")])


DIFFERENT: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
    "a dotted key": (lambda y: {"a.b": y, "a": {"b": y}}, lambda y: {"a.b": -y, "a": {"b": y}}),
    "what a dotted key hides": (lambda y: {"a": {"b": y}, "a.b": y}, lambda y: {"a": {"b": -y}, "a.b": y}),
    "a number and its name": (lambda y: {0: y, "0": y}, lambda y: {0: -y, "0": y}),
    "an empty key": (lambda y: {"": {"a": y}, "a": y}, lambda y: {"": {"a": -y}, "a": y}),
    "keys written alike": (
        lambda y: {np.float32(1): y, np.array([1.0], "f4").tobytes(): y, "1.0": y},
        lambda y: {np.float32(1): -y, np.array([1.0], "f4").tobytes(): y, "1.0": y},
    ),
    "array": (lambda y: (y, array(y)), lambda y: (y, -array(y))),
    "array of another dtype": (lambda y: (y, array(y)), lambda y: (y, array(y).astype("f8"))),
    "array of integers": (lambda y: (y, np.arange(3)), lambda y: (y, np.arange(3)[::-1])),
    "array instead of a tensor": (lambda y: (y, y.detach()), lambda y: (y, array(y))),
    "swapped array": (lambda y: (y, array(y).astype(">f4")), lambda y: (y, -array(y).astype(">f4"))),
    "long double": (lambda y: (y, array(y).astype("g")), lambda y: (y, -array(y).astype("g"))),
    "array of objects": (lambda y: (y, objects(y)), lambda y: (y, objects(-y))),
    "array of words": (lambda y: (y, np.array(["a", "b"])), lambda y: (y, np.array(["a", "c"]))),
    "array of dates": (
        lambda y: (y, np.array(["2020"], "M8[Y]")),
        lambda y: (y, np.array(["2021"], "M8[Y]")),
    ),
    "record": (lambda y: (y, structured(1, "a")), lambda y: (y, structured(1, "b"))),
    "mask": (lambda y: (y, masked(y, 1)), lambda y: (y, masked(y, 2))),
    "scalar": (lambda y: (y, np.float32(y.detach().sum())), lambda y: (y, np.float32(0))),
    "whole scalar": (lambda y: (y, np.int64(2)), lambda y: (y, np.int64(3))),
    "true scalar": (lambda y: (y, np.bool_(True)), lambda y: (y, np.bool_(False))),
    "complex number": (lambda y: (y, complex(y.sum().item())), lambda y: (y, complex(-y.sum().item()))),
    "decimal": (lambda y: (y, Decimal(y.sum().item())), lambda y: (y, Decimal(0))),
    "deque": (lambda y: (y, collections.deque([y])), lambda y: (y, collections.deque([-y]))),
    "dict view": (lambda y: (y, {"a": y}.values()), lambda y: (y, {"a": -y}.values())),
    "dict items": (lambda y: (y, {"a": y}.items()), lambda y: (y, {"a": -y}.items())),
    "slots": (lambda y: (y, Slots(y)), lambda y: (y, Slots(-y))),
    "set": (lambda y: (y, {1}), lambda y: (y, {2})),
    "set of words": (lambda y: (y, {"a", ("b", 1)}), lambda y: (y, {"a", ("c", 1)})),
    "set of rounded": (lambda y: (y, {0.5, y.sum().item()}), lambda y: (y, {0.5, -y.sum().item()})),
    "attribute of a dict": (lambda y: Named({"a": y}, y), lambda y: Named({"a": y}, -y)),
    "something to call": (lambda y: (y, Called(y)), lambda y: (y, Called(-y))),
    "dtype": (lambda y: (y, torch.half), lambda y: (y, torch.float)),
    "date": (lambda y: (y, datetime.date(2020, 1, 1)), lambda y: (y, datetime.date(2020, 1, 2))),
    "around in a circle": (itself, lambda y: [y, [y, 0]]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_no_part_of_an_output_is_dropped(what: str) -> None:
    before, after = DIFFERENT[what]
    same = compare_outputs(before, before)
    assert same.passed, same.failures
    assert not same.notes
    assert not compare_outputs(before, after).passed


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (lambda y: (y, {y}), "output 1 (set)"),
        (lambda y: (y, object()), "output 1 (object)"),
        (lambda y: (y, lambda: y), "output 1 (function)"),
        (lambda y: (y, (i for i in "ab")), "output 1 (generator)"),
        (lambda y: (y, {"f": functools.partial(abs)}), "output 1.f (partial)"),
        (lambda y: (y, y.clone().tolist), "output 1 (builtin_function_or_method)"),
        (lambda y: (y, nn.Linear(1, 1)), "output 1 (Linear)"),
        (lambda y: (y, Raises()), "output 1 (Raises)"),
        (lambda y: (y, Elementwise()), "output 1 (Elementwise)"),
        (lambda y: (y, ValueError(y)), "output 1 (ValueError)"),
        (
            lambda y: (y, [object() for _ in range(7)]),
            ", ".join(f"output 1.{index} (object)" for index in range(5)) + " and 2 more",
        ),
    ],
)
def test_outputs_that_cannot_be_compared_are_noted(make: Callable[[Tensor], Any], note: str) -> None:
    report = compare_outputs(make, make)
    assert report.passed, report.failures
    assert report.notes == [f"eval: not compared: {note}"]


def test_hidden_state_of_a_base_in_c_is_noted() -> None:
    class Failed(ValueError):
        pass

    def make(y: Tensor) -> Any:
        failed = Failed(y.sum().item())
        failed.image = y  # type: ignore[attr-defined]
        return failed

    report = compare_outputs(make, make)
    assert report.passed, report.failures
    assert [check.name for check in report.checks if check.kind == "output"] == ["image"]
    (note,) = report.notes
    assert note.startswith("eval: not compared: output (whole) (")
    assert note.endswith("Failed)")


def test_numbers_that_carry_rounding_are_judged_as_tensors() -> None:
    leaves = flatten([complex(1, math.nan), Decimal("0.5"), Fraction(1, 3)]).leaves
    assert [leaf.dtype for leaf in leaves.values()] == [torch.complex128, torch.float64, torch.float64]


def test_ordinary_names_are_plain() -> None:
    y = torch.zeros(1)
    value = {"a": [y, (y,)], "layer.0": y, 3: types.SimpleNamespace(b=y), "a-b c": {0.5: y, None: y}}
    names = {"a.0", "a.1.0", "layer.0", "3.b", "a-b c.0.5", "a-b c.None"}
    assert set(flatten(value).tensors) == names


def test_ambiguous_names_do_not_depend_on_the_order() -> None:
    one, two, three = (torch.full((1,), float(n)) for n in range(3))
    forth = flatten({"a.b": one, "a": {"b": two, "": three}}).leaves
    back = flatten({"a": {"": three, "b": two}, "a.b": one}).leaves
    assert forth == {"['a.b']": one, "a.b": two, "a['']": three}
    assert back == forth


def test_keys_with_equal_repr_are_distinguished() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    leaves = flatten({Key(): 1, Key(): 2, "key": [3]}).leaves
    assert sorted(leaves.values()) == [1, 2, 3]


def test_an_array_that_the_network_reuses_is_copied() -> None:
    held = np.zeros(2, dtype=np.float32)
    kept = flatten(held).leaves[""]
    held += 1
    assert kept.tolist() == [0, 0]


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert flatten((1.5, "a")).leaves == {"0": torch.tensor(1.5, dtype=torch.float64), "1": "a"}


class Conditioned(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.embedding = nn.Embedding(10, 8, sparse=True)
        self.up = nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.up(
            ScaleGradient.apply(self.embedding(index)[:, :, None, None].expand(-1, -1, 4, 4), self.factor)
        )


class Mesh(nn.Module):
    """A sparse buffer, written to in training."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.register_buffer("laplacian", torch.eye(8).to_sparse())
        self.up, self.factor = nn.ConvTranspose2d(8, 3, 4, 2, 1), factor

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.laplacian, x.transpose(0, 1).reshape(8, -1))
        if self.training:
            self.laplacian.mul_(self.factor)
        return self.up(mixed.view(8, 2, 4, 4).transpose(0, 1))


def test_sparse_gradients_are_compared() -> None:
    model, index = Conditioned(), torch.randint(10, (4,))
    swapped = swapped_copy(model)
    report = verify(model, swapped, index)
    assert report.passed, report.failures
    assert "embedding.weight" in {c.name for c in report.checks if c.kind == "grad_parameter"}
    swapped.factor = 1.05  # type: ignore[assignment]
    wrong = verify(model, swapped, index)
    assert {c.name for c in wrong.checks if not c.passed} == {"embedding.weight"}


def test_sparse_buffers_are_compared() -> None:
    model, x = Mesh(), torch.randn(2, 8, 4, 4)
    swapped = swapped_copy(model)
    report = verify(model, swapped, x)
    assert report.passed, report.failures
    assert {c.name for c in report.checks if c.kind == "buffer"} == {"laplacian"}
    assert torch.equal(model.laplacian.to_dense(), torch.eye(8))
    swapped.factor = 3.0  # type: ignore[assignment]
    wrong = verify(model, swapped, x)
    assert {c.kind for c in wrong.checks if not c.passed} == {"buffer"}
