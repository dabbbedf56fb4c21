"""A file executes nothing: every known way to make it do so, thousands of random files, and random changes of bytes."""

from __future__ import annotations

import codecs
import contextlib
import io
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attack_cases as attack
import pytest
import torch
from attack_cases import a_dict, a_tuple, layer, name_of, ordered, parameter, pickled, rebuilt, save, tensor
from loading_cases import LEGACY, RunsCommand, generator
from sampling import sampled
from torch import nn
from torch.nn.modules.module import _WrappedHook
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm, SpectralNormStateDictHook
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from tconv_swap.files.content import read_content
from tconv_swap.files.fileformat import examine
from tconv_swap.files.loading import LoadError, UntrustedError, load_model
from tconv_swap.files.records import Call, GlobalName, Items, Record

pytestmark = pytest.mark.filterwarnings("ignore")

_TYPED = GlobalName("torch._tensor", "_rebuild_from_type_v2")
_TENSOR = GlobalName("torch", "Tensor")
_LINEAR = name_of(nn.Linear)
_RELU = GlobalName("torch.nn.functional", "relu")


def hook(cls: type, **state: Record) -> Call:
    return Call(name_of(cls), a_tuple(), new=True, states=[a_dict(**state)])


def with_hook(made: Record, field: str = "_forward_pre_hooks", **state: Record) -> Call:
    weights = {f"weight_{end}": parameter(tensor()) for end in ("g", "v", "orig")}
    holds = {"_parameters": a_dict(**weights), "_buffers": a_dict(weight_u=tensor(), weight_mask=tensor())}
    return layer(nn.Identity, **{**holds, field: ordered(0, made), **state})


def typed(function: Record, cls: Record = _TENSOR, args: Record = None, state: Record = None) -> Call:
    return layer(nn.Identity, x=Call(_TYPED, a_tuple(function, cls, args or a_tuple(1), state)))


def of_another_layer() -> Call:
    other = layer(nn.Identity)
    wrapped = hook(
        _WrappedHook, hook=hook(SpectralNormStateDictHook, fn=None), with_module=True, module=other
    )
    return with_hook(wrapped, "_load_state_dict_pre_hooks")


_NORM = {"name": "weight", "dim": 0}
_SPECTRAL = {**_NORM, "n_power_iterations": 1, "eps": 1e-12}

#: What a file may try with nothing but allowed names.
CHAINS: dict[str, Callable[[], Record]] = {
    "_rebuild_from_type_v2 calls a class": lambda: typed(_LINEAR, args=a_tuple(1, 1)),
    "_rebuild_from_type_v2 calls a function": lambda: typed(_RELU, args=a_tuple(tensor())),
    "_rebuild_from_type_v2 calls an object": lambda: typed(layer(nn.Identity), args=a_tuple(tensor())),
    "_rebuild_from_type_v2 calls itself": lambda: typed(_TYPED, args=a_tuple(_LINEAR, _TENSOR, a_tuple(1, 1), None)),
    "_rebuild_from_type_v2 makes another class": lambda: typed(
        GlobalName("torch._utils", "_rebuild_tensor_v2"), name_of(nn.Identity), tensor().args
    ),
    "_rebuild_from_type_v2 replaces a method": lambda: typed(
        GlobalName("torch._utils", "_rebuild_tensor_v2"), _TENSOR, tensor().args, a_dict(backward=_RELU)
    ),
    "_rebuild_from_type_v2 holds a function": lambda: typed(
        GlobalName("torch._utils", "_rebuild_tensor_v2"), _TENSOR, tensor().args, a_dict(x=_RELU)
    ),
    "a parameter replaces a method": lambda: layer(
        nn.Identity,
        x=rebuilt("_rebuild_parameter_with_state", tensor(), True, ordered(), a_dict(__torch_function__=_RELU)),
    ),
    "Identity.forward": lambda: layer(nn.Identity, forward=_RELU),
    "Identity.forward is a layer": lambda: layer(nn.Identity, forward=layer(nn.ReLU, inplace=True)),
    "Identity.__class__": lambda: layer(nn.Identity, __class__=_LINEAR),
    "Identity._call_impl": lambda: layer(nn.Identity, _call_impl=_RELU),
    "Identity._compiled_call_impl": lambda: layer(nn.Identity, _compiled_call_impl=layer(nn.ReLU, inplace=True)),
    "an activation where no layer keeps one": lambda: layer(nn.Identity, activation=_RELU),
    "an activation in a list": lambda: layer(nn.Identity, x=Items(list, [a_tuple(_RELU)])),
    "a class where only data may be": lambda: layer(nn.Identity, x=_LINEAR),
    "a class as an activation": lambda: layer(nn.TransformerEncoderLayer, activation=_LINEAR),
    "WeightNorm.compute_weight": lambda: with_hook(hook(WeightNorm, **_NORM, compute_weight=_RELU)),
    "WeightNorm along what its weight has not": lambda: with_hook(hook(WeightNorm, name="weight", dim=3)),
    "WeightNorm with too few norms": lambda: with_hook(
        hook(WeightNorm, **_NORM),
        _parameters=a_dict(weight_g=parameter(tensor(4, (2,))), weight_v=parameter(tensor())),
    ),
    "WeightNorm works on forward": lambda: with_hook(hook(WeightNorm, name="forward", dim=0)),
    "WeightNorm works on what is not there": lambda: with_hook(hook(WeightNorm, name="x", dim=0)),
    "SpectralNorm.compute_weight": lambda: with_hook(hook(SpectralNorm, **_SPECTRAL, compute_weight=_RELU)),
    "SpectralNorm never ends": lambda: with_hook(
        hook(SpectralNorm, **{**_SPECTRAL, "n_power_iterations": 1 << 40})
    ),
    "pruning with another mask": lambda: with_hook(
        hook(prune.L1Unstructured, _tensor_name="weight", apply_mask=_RELU)
    ),
    "a hook that is a function": lambda: with_hook(_RELU),
    "a hook that is a class": lambda: with_hook(_LINEAR, "_forward_hooks"),
    "_WrappedHook of a class": lambda: with_hook(
        hook(_WrappedHook, hook=_LINEAR, with_module=False), "_load_state_dict_pre_hooks"
    ),
    "_WrappedHook binds an argument": lambda: with_hook(
        hook(_WrappedHook, hook=layer(nn.Identity), with_module=True, module=layer(nn.Identity))
    ),
    "_WrappedHook of another layer": of_another_layer,
    "ParameterDict._key_to_attr": lambda: layer(nn.ParameterDict, _keys=Items(dict, []), _key_to_attr=_RELU),
    "ParameterDict._key_to_attr is a dict": lambda: layer(
        nn.ParameterDict, _keys=Items(dict, []), _key_to_attr=a_dict(x="__globals__")
    ),
    "OrderedDict.update": lambda: layer(
        nn.Identity, x=Call(GlobalName("collections", "OrderedDict"), a_tuple(), states=[a_dict(update=_RELU)])
    ),
    "a layer called": lambda: Call(layer(nn.Identity), a_tuple(1)),
    "a class of a layer called": lambda: Call(_LINEAR, a_tuple(1, 1)),
    "a layer made with arguments": lambda: Call(_LINEAR, a_tuple(1, 1), new=True, states=[Items(dict, [])]),
    "a state that is no dict": lambda: Call(_LINEAR, a_tuple(), new=True, states=[a_tuple(a_dict(), a_dict(x=1))]),
    "two states": lambda: Call(_LINEAR, a_tuple(), new=True, states=layer(nn.Linear).states * 2),
    "a codec that imports": lambda: layer(
        nn.Identity, x=Call(GlobalName("_codecs", "encode"), a_tuple("x", "zlib_codec"))
    ),
    "a bytearray of a terabyte": lambda: layer(
        nn.Identity, x=Call(GlobalName("builtins", "bytearray"), a_tuple(1 << 40))
    ),
    "a handle of something else": lambda: layer(
        nn.Identity,
        x=Call(name_of(RemovableHandle), a_tuple(), new=True, states=[a_tuple(layer(nn.Identity), 1)]),
    ),
    "our layer of another class": lambda: Call(
        GlobalName("tconv_swap.layer", "_new_swapped_layer"), a_tuple(_LINEAR), states=layer(nn.Linear).states
    ),
    "a layer is a key": lambda: layer(nn.Identity, x=Items(dict, [layer(nn.Identity), 1])),
    "a name of a layer that is a method": lambda: layer(nn.Identity, _modules=Items(dict, [1, layer(nn.Identity)])),
    "a function among the layers": lambda: layer(nn.Sequential, _modules=Items(dict, ["0", _RELU])),
    "a tensor among the parameters": lambda: layer(nn.Identity, _parameters=a_dict(weight=tensor())),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """What PyTorch imports and compiles at its first use of anything is not the files' doing."""
    codecs.lookup("raw-unicode-escape")
    for model in (*honest(), generator(), nn.DataParallel(nn.Identity())):
        attack.use(model)


def honest() -> list[nn.Module]:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True)
    return [
        nn.Sequential(
            nn.utils.weight_norm(nn.ConvTranspose2d(4, 4, 2)),
            nn.utils.spectral_norm(nn.Conv2d(4, 4, 1)),
            prune.l1_unstructured(nn.Conv2d(4, 2, 1), "weight", 0.5),
        ),
        nn.ModuleDict({"a": nn.LSTM(4, 3), "b": nn.ParameterDict({"c": torch.ones(2)}), "d": encoder}),
    ]


def test_the_watch_sees_what_is_executed(tmp_path: Path) -> None:
    torch.save([RunsCommand(tmp_path / "executed")], tmp_path / "model.pt")
    with attack.watched() as seen, contextlib.suppress(LoadError):
        load_model(tmp_path / "model.pt", unsafe_pickle=True)
    assert any(event.startswith("os.system") for event in seen), seen
    with attack.watched() as seen:
        exec("x = 1")
        (tmp_path / "written").write_text("x")
    assert {event.split()[0] for event in seen} >= {"exec", "compile", "open"}


@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_of_allowed_names_is_refused(tmp_path: Path, chain: str) -> None:
    path = save(tmp_path / "model.pt", pickled(CHAINS[chain]()))
    inside = save_nested(tmp_path, CHAINS[chain]())
    with attack.watched() as seen:
        for file in (path, inside):
            with pytest.raises(LoadError, match="holds a damaged network"):
                load_model(file)
    assert seen == []


def save_nested(directory: Path, record: Record) -> Path:
    """The same in the middle of a network."""
    outer = layer(nn.Sequential, _modules=Items(dict, ["0", layer(nn.Identity, deep=Items(list, [record]))]))
    return save(directory / "nested.pt", pickled(outer))


def test_the_layers_of_the_chains_load_without_the_attack(tmp_path: Path) -> None:
    """The chains are refused for their content, and not for their form."""
    normed = with_hook(hook(WeightNorm, **_NORM), weight=tensor())
    handle = Call(name_of(RemovableHandle), a_tuple(), new=True, states=[a_tuple(ordered(), 1, a_tuple())])
    inner = [
        layer(nn.Identity, x=Call(_TYPED, a_tuple(name, _TENSOR, tensor().args, a_dict(note=1))))
        for name in [GlobalName("torch._utils", "_rebuild_tensor_v2")]
    ]
    metadata = Call(GlobalName("collections", "OrderedDict"), a_tuple(), states=[a_dict(_metadata=ordered())])
    inner += [layer(nn.Identity, x=handle, y=metadata), normed, layer(nn.ParameterDict, _keys=a_dict(a=None))]
    inner += [with_hook(hook(SpectralNorm, **_SPECTRAL)), with_hook(layer(nn.Identity))]
    inner += [with_hook(hook(prune.L1Unstructured, _tensor_name="weight", amount=0.5))]
    names = [part for i, one in enumerate(inner) for part in (str(i), one)]
    path = save(tmp_path / "model.pt", pickled(layer(nn.Sequential, _modules=Items(dict, names))))
    with attack.watched() as seen:
        loaded: Any = load_model(path).model
        attack.use(loaded)
    assert seen == []
    assert loaded[0].x.note == 1
    assert len(loaded) == len(inner)


def test_the_legacy_reader_has_no_function_to_change(tmp_path: Path) -> None:
    call = GlobalName("tconv_swap.files.legacy", "container_class")
    given = a_tuple(None, a_dict(__defaults__=a_tuple(1)))
    for record in (Call(call, a_tuple(1), states=[given]), layer(nn.Identity, x=call)):
        with pytest.raises(UntrustedError, match=r"legacy\.container_class"):
            load_model(save(tmp_path / "model.pt", pickled(record)))
    # A state for what is no object at all: BUILD on the name itself.
    content = pickled(call)[:-1] + pickled(given)[2:-1] + b"b."
    with pytest.raises(LoadError, match="a state to something that is not an object"):
        load_model(save(tmp_path / "model.pt", content))


def attempt(path: Path) -> bool:
    """Whether a file loads. Anything else than that or a refusal, or anything that it does besides, fails."""
    with attack.watched() as seen:
        try:
            model = load_model(path).model
        except LoadError as error:
            model, refusal = None, str(error)
        else:
            refusal = ""
            attack.use(model)
    assert seen == []
    assert "\n" not in refusal
    return model is not None


@pytest.mark.parametrize("part", sampled(range(4), 4))
def test_random_records(tmp_path: Path, part: int) -> None:
    loaded = 0
    for seed in range(part * 500, part * 500 + 500):
        chance = random.Random(seed)
        root = attack.anything(chance)
        if chance.random() < 0.5:
            # Every other time a layer that is right, so that what is beside it is looked at.
            inside = root if chance.random() < 0.5 else layer(nn.Identity)
            root = layer(nn.Sequential, _modules=Items(dict, ["0", inside]), x=attack.anything(chance))
        loaded += attempt(save(tmp_path / "model.pt", pickled(root)))
    assert 0 < loaded < 400


@pytest.mark.parametrize("which", [0, 1])
def test_networks_with_one_replaced_record(tmp_path: Path, which: int, exhaustive: bool) -> None:
    """A harmless file in which one part is replaced."""
    torch.save(honest()[which], tmp_path / "honest.pt")
    with zipfile.ZipFile(tmp_path / "honest.pt") as archive:
        data = {
            name.rpartition("data/")[2]: archive.read(name) for name in archive.namelist() if "/data/" in name
        }
    read = pickle.dumps(read_content(examine(tmp_path / "honest.pt")).pickle.root)
    loaded = 0
    count = 300 if exhaustive else 90
    for seed in range(count):
        chance = random.Random(seed)
        root = pickle.loads(read)
        attack.changed(chance, root)
        try:
            content = pickled(root)
        except attack.UnwritableError:
            continue
        loaded += attempt(save(tmp_path / "model.pt", content, data))
    assert count / 30 < loaded < count - count / 30


@pytest.mark.parametrize("which", sampled([2, 0, 1], 3))
@pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
def test_random_changes_of_bytes(tmp_path: Path, which: int, how: dict[str, Any]) -> None:
    model = [*honest(), generator()][which]
    whole = io.BytesIO()
    torch.save(model, whole, **how)
    content = {}
    if not how:
        with zipfile.ZipFile(whole) as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
    path = tmp_path / "model.pt"
    loaded = 0
    for seed in range(200):
        chance = random.Random(seed)
        name = next((name for name in content if name.endswith("data.pkl")), "")
        changed = bytearray(content[name] if content else whole.getvalue())
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        if content:
            # In the pickle, and not in the archive, whose check sums would show it.
            with zipfile.ZipFile(path, "w") as archive:
                for other, data in content.items():
                    archive.writestr(other, bytes(changed) if other == name else data)
        else:
            path.write_bytes(changed)
        loaded += attempt(path)
    assert loaded > 0
