"""Impossible tensors and files that would take forever are refused quickly."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import attack_cases as attack
import pytest
import torch
from attack_cases import a_dict, a_tuple, layer, ordered, pickled, rebuilt, save, tensor
from torch import nn

from tconv_swap.files.containers import MAX_ITEMS
from tconv_swap.files.loading import LoadError, load_inputs, load_model, load_weights
from tconv_swap.files.records import Call, GlobalName, Items, Record

pytestmark = pytest.mark.filterwarnings("ignore")


# --- tensors that are none ----------------------------------------------------------------------------------

_LONG = tensor(4, (4,), "Long")


def coo(indices: Record, values: Record, size: tuple[int, ...], *coalesced: Record) -> Call:
    return sparse("torch.sparse_coo", indices, values, a_tuple(*size), *coalesced)


def sparse(name: str, *data: Record) -> Call:
    layout = Call(GlobalName("torch.serialization", "_get_layout"), a_tuple(name))
    return rebuilt("_rebuild_sparse_tensor", layout, a_tuple(*data))


def quantized(*quantizer: Record, size: tuple[int, ...] = (4,), dtype: str = "QInt8") -> Call:
    storage, offset, sizes, strides, *_ = tensor(4, size, dtype).args.items
    return rebuilt("_rebuild_qtensor", storage, offset, sizes, strides, a_tuple(*quantizer), False, ordered())


_AFFINE, _CHANNELS = GlobalName("torch", "per_tensor_affine"), GlobalName("torch", "per_channel_affine")
_TWO = Items(list, [1.0, 1.0])

FORGED: dict[str, Callable[[], Record]] = {
    "beyond its storage": lambda: tensor(4, (5,)),
    "an offset beyond": lambda: tensor(4, (4,), offset=1),
    "a negative offset": lambda: tensor(4, (4,), offset=-1),
    "a negative size": lambda: tensor(4, (-1,)),
    "a negative stride": lambda: tensor(4, (4,), stride=a_tuple(-1)),
    "strides beyond": lambda: tensor(4, (2, 2), stride=a_tuple(3, 1)),
    "more strides than sizes": lambda: tensor(4, (4,), stride=a_tuple(1, 1)),
    "a size without end": lambda: tensor(4, (1 << 62, 1 << 62), stride=a_tuple(0, 0)),
    "a storage that is not there": lambda: tensor(3, (3,)),
    "a storage of another size": lambda: tensor(
        4, (4,), storage=attack.Reference(a_tuple("storage", GlobalName("torch", "DoubleStorage"), "Float4", "cpu", 4))
    ),
    "gradients of whole numbers": lambda: tensor(4, (4,), "Long", requires_grad=True),
    "hooks": lambda: tensor(hooks=ordered(0, 1)),
    "sparse indices beyond": lambda: coo(tensor(2, (1, 2), "Long"), tensor(4, (2,)), (4,)),
    "sparse, said to be coalesced": lambda: coo(
        tensor(4, (1, 4), "Long", stride=a_tuple(0, 0)), tensor(), (4,), True
    ),
    "sparse with fewer values": lambda: coo(tensor(4, (1, 4), "Long"), tensor(4, (3,)), (4,)),
    "sparse indices that are none": lambda: coo(tensor(4, (1, 4)), tensor(), (4,)),
    "a sparse size without end": lambda: coo(tensor(4, (1, 4), "Long"), tensor(), (1 << 62, 1 << 62)),
    "compressed rows beyond": lambda: sparse(
        "torch.sparse_csr", tensor(2, (2,), "Long"), _LONG, tensor(), a_tuple(1, 4)
    ),
    "compressed columns beyond": lambda: sparse(
        "torch.sparse_csr", tensor(4, (2,), "Long"), tensor(4, (1,), "Long", offset=3), tensor(4, (1,)), a_tuple(1, 2)
    ),
    "a layout that is none": lambda: sparse("torch.strided", _LONG, tensor(), a_tuple(4)),
    "a scale of nothing": lambda: quantized(_AFFINE, 0.0, 0),
    "a scale that is no number": lambda: quantized(_AFFINE, float("nan"), 0),
    "a zero point beyond": lambda: quantized(_AFFINE, 1.0, 1 << 40),
    "a channel axis beyond": lambda: quantized(_CHANNELS, _TWO, Items(list, [0, 0]), 7, size=(2, 2)),
    "fewer scales than channels": lambda: quantized(_CHANNELS, Items(list, [1.0]), Items(list, [0]), 0, size=(2, 2)),
    "quantised and of no such dtype": lambda: quantized(_AFFINE, 1.0, 0, dtype="Float"),
    "a quantised dtype without a scale": lambda: tensor(4, (4,), "QInt8"),
    "a nested tensor beyond its buffer": lambda: rebuilt(
        "_rebuild_nested_tensor",
        tensor(),
        tensor(4, (1, 1), "Long", offset=3),
        tensor(4, (1, 1), "Long", offset=1),
        tensor(4, (1,), "Long", offset=3),
    ),
    "a meta tensor without end": lambda: rebuilt(
        "_rebuild_meta_tensor_no_storage", GlobalName("torch", "float32"), a_tuple(1 << 62, 8), a_tuple(8, 1), False
    ),
}  # fmt: skip


@pytest.mark.parametrize("forged", FORGED)
def test_impossible_tensors_are_refused(tmp_path: Path, forged: str) -> None:
    root = layer(nn.Identity, _buffers=a_dict(x=FORGED[forged]()))
    path = save(tmp_path / "model.pt", pickled(root))
    with attack.watched() as seen, pytest.raises(LoadError, match="holds a damaged network"):
        load_model(path)
    assert seen == []


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    """The same as in the forged files, but true."""
    kinds = {
        "coo": torch.eye(3).to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
        "csr": torch.eye(3).to_sparse_csr(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8),
        "channels": torch.quantize_per_channel(torch.ones(2, 3), torch.ones(2), torch.zeros(2), 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
        "meta": torch.ones(3, device="meta"),
        "conj": torch.ones(3, dtype=torch.complex64).conj(),
        "uint16": torch.ones(3, dtype=torch.uint16),
        "expanded": torch.ones(1).expand(5),
        "empty": torch.ones(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "buffer": nn.Buffer(torch.ones(2)),
    }  # fmt: skip
    model = nn.Identity()
    for name, value in kinds.items():
        model.register_buffer(name, value)
    torch.save(model, tmp_path / "model.pt")
    loaded = dict(load_model(tmp_path / "model.pt").model.named_buffers())
    for name, value in kinds.items():
        found = loaded[name]
        assert (found.layout, found.dtype, found.device) == (value.layout, value.dtype, value.device)
        if name == "nested":
            assert all(torch.equal(a, b) for a, b in zip(found.unbind(), value.unbind(), strict=True))
            continue
        assert found.shape == value.shape
        if name != "meta":
            assert torch.equal(_dense(found), _dense(value)), name


def _dense(value: torch.Tensor) -> torch.Tensor:
    value = value.to_dense() if value.layout is not torch.strided else value
    return value.dequantize() if value.is_quantized else value


# --- what would take for ever -------------------------------------------------------------------------------


def doubled(times: int, kind: type = tuple) -> Record:
    inner: Record = Items(kind, [1])
    for _ in range(times):
        inner = Items(kind, [inner, inner])
    return inner


def nested(depth: int, kind: type = list) -> Record:
    inner: Record = Items(kind, [])
    for _ in range(depth):
        inner = Items(kind, [inner])
    return inner


def containing_itself() -> Record:
    made = Items(list, [])
    made.items.append(made)
    return made


def doubled_layers(times: int) -> Record:
    inner = layer(nn.Identity)
    for _ in range(times):
        inner = layer(nn.Sequential, _modules=Items(dict, ["0", inner, "1", inner]))
    return inner


def nested_layers(depth: int) -> Record:
    inner = layer(nn.Identity)
    for _ in range(depth):
        inner = layer(nn.Sequential, _modules=Items(dict, ["0", inner]))
    return inner


HUGE = {
    "shared": (lambda: doubled(40), f"more than {MAX_ITEMS} items"),
    "shared lists": (lambda: doubled(40, list), f"more than {MAX_ITEMS} items"),
    "deep": (lambda: nested(200), "nested more than 100 deep"),
    "itself": (containing_itself, "contains itself"),
}


@pytest.mark.parametrize("huge", HUGE)
def test_huge_containers_are_refused(tmp_path: Path, huge: str) -> None:
    make, reason = HUGE[huge]
    before = time.process_time()
    with pytest.raises(LoadError, match=reason):
        load_inputs(save(tmp_path / "inputs.pt", pickled(Items(list, [tensor(), make()]))))
    with pytest.raises(LoadError, match=reason):
        load_weights(save(tmp_path / "inputs.pt", pickled(a_dict(weight=tensor(), x=make()))))
    with pytest.raises(LoadError, match=reason):
        load_model(save(tmp_path / "model.pt", pickled(layer(nn.Identity, x=make()))))
    assert time.process_time() - before < 5


def test_huge_layers_are_refused(tmp_path: Path) -> None:
    before = time.process_time()
    for record, reason in ((doubled_layers(30), "names"), (nested_layers(120), "deep")):
        with pytest.raises(LoadError, match=reason):
            load_model(save(tmp_path / "model.pt", pickled(record)))
    assert time.process_time() - before < 5
    assert (
        len(list(load_model(save(tmp_path / "model.pt", pickled(doubled_layers(10)))).model.modules())) == 11
    )
    assert (
        len(list(load_model(save(tmp_path / "model.pt", pickled(nested_layers(90)))).model.modules())) == 91
    )


def test_a_pickle_of_very_deep_lists(tmp_path: Path) -> None:
    content = b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."
    with pytest.raises(LoadError, match="nested more than 100 deep"):
        load_inputs(save(tmp_path / "inputs.pt", content))


def test_more_instructions_than_any_network_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tconv_swap.files.records.MAX_OPCODES", 1000)
    with pytest.raises(LoadError, match="more than 1000 instructions"):
        load_model(save(tmp_path / "model.pt", b"\x80\x02" + b"N0" * 1000 + b"N."))
    with pytest.raises(LoadError, match="more than 4096 bits"):
        load_model(save(tmp_path / "model.pt", pickled(1 << 5000)))
