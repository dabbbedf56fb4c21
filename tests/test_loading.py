"""Loading and saving networks: what loads, what is refused and why; nothing untrusted is executed."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attack_cases import a_tuple, pickled, save
from loading_cases import LEGACY, RunsCommand, generator, same
from torch import nn

import tconv_swap
from tconv_swap.files.content import read_content
from tconv_swap.files.fileformat import examine
from tconv_swap.files.loading import LoadError, UntrustedError, load_model, parse_trust
from tconv_swap.files.records import Call, GlobalName
from tconv_swap.surgery import swap_layers


class Evaluates:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"open({str(self.marker)!r}, 'w').close()",)


@pytest.fixture
def module_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that leaves a trace when it is imported, with two classes of layers."""
    name = "users_network"
    (tmp_path / f"{name}.py").write_text(
        "from pathlib import Path\n"
        "from torch import nn\n"
        "Path(__file__).with_name('imported').touch()\n"
        "class Net(nn.Sequential): pass\n"
        "class Up(nn.ConvTranspose2d): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def forget(name: str, tmp_path: Path) -> None:
    sys.modules.pop(name)
    (tmp_path / "imported").unlink()


class TestOwnLayers:
    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_a_network_of_pytorchs_layers_loads(self, tmp_path: Path, how: dict[str, Any]) -> None:
        model = generator()
        torch.save(model, tmp_path / "model.pt", **how)
        loaded = load_model(tmp_path / "model.pt")
        assert same(loaded.model, model)
        assert loaded.missing_devices == ()

    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_a_swapped_network_loads(self, tmp_path: Path, how: dict[str, Any]) -> None:
        torch.save(swap_layers(generator()), tmp_path / "model.pt", **how)
        loaded = load_model(tmp_path / "model.pt").model
        assert isinstance(loaded[0], tconv_swap.ConvTranspose2d)

    @pytest.mark.parametrize(
        "make",
        [
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 2, 8, activation="gelu"), 1, enable_nested_tensor=False
            ),
            lambda: nn.Sequential(nn.utils.spectral_norm(nn.ConvTranspose2d(2, 3, 2))),
            lambda: nn.utils.prune.l1_unstructured(nn.Conv2d(2, 2, 1), "weight", 0.5),
            lambda: nn.ModuleDict({"a": nn.LSTM(2, 3), "b": nn.ModuleList([nn.Embedding(3, 2)])}),
            lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
            lambda: nn.DataParallel(nn.Conv2d(2, 2, 1)),
            lambda: nn.Bilinear(1, 2, 3).half().requires_grad_(False),
        ],
    )
    def test_everything_in_torch_nn_loads(self, tmp_path: Path, make: Callable[[], nn.Module]) -> None:
        model = make()
        torch.save(model, tmp_path / "model.pt")
        assert same(load_model(tmp_path / "model.pt").model, model)

    def test_attributes_hooks_and_modes_survive(self, tmp_path: Path) -> None:
        model = generator().eval()
        model.size, model.dtype, model.part = torch.Size([1, 2]), torch.float16, slice(1, 2)
        model.register_forward_hook(nn.Identity())
        model[0].weight.requires_grad_(False)
        torch.save(model, tmp_path / "model.pt")
        loaded: Any = load_model(tmp_path / "model.pt").model
        assert (loaded.size, loaded.dtype, loaded.part) == (torch.Size([1, 2]), torch.float16, slice(1, 2))
        assert len(loaded._forward_hooks) == 1
        assert not loaded.training
        assert not loaded[0].weight.requires_grad

    @pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
    def test_every_pickle_protocol(self, tmp_path: Path, protocol: int) -> None:
        model = generator()
        model.sizes = {"a": [1.5, None, b"bytes", bytearray(b"more"), {3}, frozenset([4]), 1j, -(2**70)]}
        torch.save(model, tmp_path / "model.pt", pickle_protocol=protocol)
        loaded: Any = load_model(tmp_path / "model.pt").model
        assert same(loaded, model)
        assert loaded.sizes == model.sizes

    def test_legacy_network_that_uses_the_word_of_its_own_format(self, tmp_path: Path) -> None:
        # Layer references of a legacy file start with "module", which DataParallel calls its network.
        model = nn.DataParallel(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)))
        torch.save(model, tmp_path / "model.pt", **LEGACY)
        assert same(load_model(tmp_path / "model.pt").model, model)

    def test_shared_layers_and_tied_weights_stay_so(self, tmp_path: Path) -> None:
        model = generator()
        model.append(model[0])
        model.append(nn.ConvTranspose2d(4, 3, 4))
        model[4].weight = model[0].weight
        for how in ({}, LEGACY):
            torch.save(model, tmp_path / "model.pt", **how)
            loaded: Any = load_model(tmp_path / "model.pt").model
            assert loaded[3] is loaded[0]
            assert loaded[4].weight is loaded[0].weight

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    def test_tensors_of_a_missing_gpu_land_on_the_cpu(self, tmp_path: Path) -> None:
        path = tmp_path / "model.pt"
        torch.save(generator(), tmp_path / "cpu.pt")
        with zipfile.ZipFile(tmp_path / "cpu.pt") as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                # The location of every storage, a pickled string with its length.
                cuda = old.read(name).replace(b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0")
                new.writestr(name, cuda)
        loaded = load_model(path)
        assert loaded.missing_devices == ("cuda:0",)
        assert same(loaded.model, generator())


class TestRefusals:
    """Everything that is not a saved network: one line that names the file and says what it is."""

    def refusal(self, path: Path) -> str:
        with pytest.raises(LoadError) as caught:
            load_model(path)
        message = str(caught.value)
        assert "\n" not in message
        assert path.name in message
        assert len(message) < 500
        return message

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (lambda: generator().state_dict(), "state_dict"),
            (lambda: {"weights": generator().state_dict(), "epoch": 3}, "checkpoint .*'weights', 'epoch'"),
            (lambda: {"net": generator(), "epoch": 3}, "network under 'net'"),
            (lambda: torch.ones(3), "holds a Tensor"),
            (lambda: [1, 2], "holds a list"),
            (dict, "no keys"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_no_network(
        self, tmp_path: Path, content: Callable[[], Any], reason: str, how: dict[str, Any]
    ) -> None:
        torch.save(content(), tmp_path / "model.pt", **how)
        with pytest.raises(LoadError, match=reason):
            load_model(tmp_path / "model.pt")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "is empty"),
            (b"not a network at all", "unknown format"),
            (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5"),
            (b"\x1f\x8b\x08" + bytes(99), "gzip"),
            ((2).to_bytes(8, "little") + b"{}", "safetensors"),
            (b"\x80", "truncated"),
            (b"\x80\x02", "truncated"),
            (b"PK\x03\x04", "truncated"),
            (b"PK\x03\x04" + bytes(999), "truncated"),
            (pickle.dumps({"a": 1}), "plain pickle"),
            (pickle.dumps(generator()), "plain pickle"),
        ],
    )
    def test_other_files(self, tmp_path: Path, content: bytes, reason: str) -> None:
        (tmp_path / "model.pt").write_bytes(content)
        assert reason in self.refusal(tmp_path / "model.pt")

    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_truncated_anywhere(self, tmp_path: Path, how: dict[str, Any]) -> None:
        torch.save(generator(), tmp_path / "whole.pt", **how)
        whole = (tmp_path / "whole.pt").read_bytes()
        path = tmp_path / "model.pt"
        for length in {*range(1, len(whole) - 1, len(whole) // 40), len(whole) - 1}:
            path.write_bytes(whole[:length])
            self.refusal(path)

    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_damaged_bytes_never_raise_anything_else(self, tmp_path: Path, how: dict[str, Any]) -> None:
        torch.save(generator(), tmp_path / "whole.pt", **how)
        whole = (tmp_path / "whole.pt").read_bytes()
        path = tmp_path / "model.pt"
        for seed in range(150):
            damaged = bytearray(whole)
            random = np.random.default_rng(seed)
            for position in random.integers(0, len(whole), 4):
                damaged[position] = random.integers(0, 256)
            path.write_bytes(damaged)
            with contextlib.suppress(LoadError):
                load_model(path)

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_torchscript(self, tmp_path: Path) -> None:
        torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), str(tmp_path / "model.pt"))
        assert "TorchScript" in self.refusal(tmp_path / "model.pt")

    def test_torch_export(self, tmp_path: Path) -> None:
        exported = torch.export.export(nn.Linear(1, 1), (torch.ones(1, 1),))
        torch.export.save(exported, tmp_path / "model.pt2")
        assert "--unsafe-pickle loads it" in self.refusal(tmp_path / "model.pt2")

    def test_other_zip_archives(self, tmp_path: Path) -> None:
        for name in ("a.txt", "folder/a.txt", "folder/version"):
            with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
                archive.writestr(name, "3")
            self.refusal(tmp_path / "model.pt")

    def test_missing_file_directory_and_pipe(self, tmp_path: Path) -> None:
        assert "no such file" in self.refusal(tmp_path / "nothing.pt")
        (tmp_path / "directory.pt").mkdir()
        assert "is a directory" in self.refusal(tmp_path / "directory.pt")
        os.mkfifo(tmp_path / "pipe.pt")
        assert "not a regular file" in self.refusal(tmp_path / "pipe.pt")
        (tmp_path / "loop.pt").symlink_to(tmp_path / "loop.pt")
        assert "cannot be read" in self.refusal(tmp_path / "loop.pt")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
    def test_unreadable_file(self, tmp_path: Path) -> None:
        torch.save(generator(), tmp_path / "model.pt")
        (tmp_path / "model.pt").chmod(0)
        assert "no permission" in self.refusal(tmp_path / "model.pt")

    def test_permission_error_whoever_runs_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.save(generator(), tmp_path / "model.pt")

        def refuse(*_: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)
        assert "no permission" in self.refusal(tmp_path / "model.pt")

    def test_a_name_that_would_move_the_cursor_is_escaped(self, tmp_path: Path) -> None:
        with pytest.raises(LoadError) as caught:
            load_model(tmp_path / "a\x1b[2Jb\n.pt")
        assert str(caught.value).isprintable()

    def test_a_layer_name_with_control_characters(self, tmp_path: Path) -> None:
        model = generator()
        model.add_module("a\x1b[2J", nn.ReLU())
        torch.save(model, tmp_path / "model.pt")
        assert "damaged network" in self.refusal(tmp_path / "model.pt")

    @pytest.mark.parametrize(
        "attributes", [{}, {"_parameters": 3}, {"_modules": {"a": 3}}, {"training": "no"}]
    )
    def test_a_module_without_its_inside(self, tmp_path: Path, attributes: dict[str, Any]) -> None:
        model = nn.Linear(1, 1)
        if not attributes:
            del model.__dict__["_parameters"]
        model.__dict__.update(attributes)
        torch.save(model, tmp_path / "model.pt")
        assert "damaged network" in self.refusal(tmp_path / "model.pt")

    def test_a_module_that_contains_itself(self, tmp_path: Path) -> None:
        model = generator()
        model._modules["again"] = model
        torch.save(model, tmp_path / "model.pt")
        assert "damaged network" in self.refusal(tmp_path / "model.pt")


class TestTrust:
    @pytest.mark.parametrize("bomb", [RunsCommand, Evaluates])
    @pytest.mark.parametrize("how", [{}, LEGACY, {"pickle_protocol": 4}], ids=["zip", "legacy", "protocol 4"])
    def test_nothing_in_a_hostile_file_is_executed(
        self, tmp_path: Path, bomb: Callable[[Path], Any], how: dict[str, Any]
    ) -> None:
        marker, path = tmp_path / "executed", tmp_path / "model.pt"
        model = generator()
        model.payload = bomb(marker)
        torch.save(model, path, **how)
        names = {RunsCommand: "posix:system", Evaluates: "builtins:eval"}
        with pytest.raises(UntrustedError) as caught:
            load_model(path)
        assert [name.option for name in caught.value.names] == [names[bomb]]
        assert not marker.exists()
        # The same file does execute where everything is allowed: the test would notice.
        load_model(path, unsafe_pickle=True)
        assert marker.exists()

    def test_a_plain_pickle_is_named_and_not_executed(self, tmp_path: Path) -> None:
        marker, path = tmp_path / "executed", tmp_path / "model.pkl"
        path.write_bytes(pickle.dumps(RunsCommand(marker)))
        for unsafe in (False, True):
            with pytest.raises(LoadError, match=r"plain pickle.*posix\.system"):
                load_model(path, unsafe_pickle=unsafe)
        assert not marker.exists()

    @pytest.mark.parametrize(
        "name", ["posix:system", "builtins:eval", "builtins:getattr", "subprocess:Popen"]
    )
    def test_what_can_do_anything_cannot_be_trusted_by_name(self, tmp_path: Path, name: str) -> None:
        module, _, function = name.partition(":")
        path = tmp_path / "model.pt"
        torch.save(generator(), tmp_path / "plain.pt")
        with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(path, "w") as new:
            for record in old.namelist():
                call = f"c{module}\n{function}\n".encode()
                content = old.read(record)
                new.writestr(record, content.replace(b"\x80\x02", b"\x80\x02" + call, 1))
        with pytest.raises(UntrustedError, match=f"{module}.{function} it can do anything") as caught:
            load_model(path, trust=[name])
        assert "add: --trust" not in str(caught.value)

    @pytest.mark.parametrize("how", [{}, LEGACY], ids=["zip", "legacy"])
    def test_trusted_classes_are_imported_and_no_others(
        self, tmp_path: Path, module_of_a_user: str, how: dict[str, Any]
    ) -> None:
        users = __import__(module_of_a_user)
        model = users.Net(users.Up(4, 3, 2), nn.ReLU())
        path = tmp_path / "model.pt"
        torch.save(model, path, **how)
        forget(module_of_a_user, tmp_path)

        with pytest.raises(UntrustedError) as caught:
            load_model(path)
        assert [name.option for name in caught.value.names] == ["users_network:Net", "users_network:Up"]
        assert "--trust users_network:Net --trust users_network:Up" in str(caught.value)
        with pytest.raises(UntrustedError) as caught:
            load_model(path, trust=["users_network:Up"])
        assert [name.option for name in caught.value.names] == ["users_network:Net"]
        assert not (tmp_path / "imported").exists()

        loaded = load_model(path, trust=["users_network:Up", "users_network:Net"]).model
        assert same(loaded, model)
        assert (tmp_path / "imported").exists()

    def test_a_trusted_name_that_the_file_does_not_use_is_not_imported(
        self, tmp_path: Path, module_of_a_user: str
    ) -> None:
        torch.save(generator(), tmp_path / "model.pt")
        load_model(tmp_path / "model.pt", trust=[f"{module_of_a_user}:Net"])
        assert not (tmp_path / "imported").exists()

    def test_swapped_layers_of_a_users_class_load(self, tmp_path: Path, module_of_a_user: str) -> None:
        users = __import__(module_of_a_user)
        model = swap_layers(nn.Sequential(users.Up(4, 3, 2)))
        assert isinstance(model[0], tconv_swap.ConvTranspose2d)
        torch.save(model, tmp_path / "model.pt")
        loaded: Any = load_model(tmp_path / "model.pt", trust=["users_network:Up"]).model
        assert isinstance(loaded[0], tconv_swap.ConvTranspose2d)
        assert isinstance(loaded[0], users.Up)

    def test_a_module_that_is_not_there(self, tmp_path: Path, module_of_a_user: str) -> None:
        users = __import__(module_of_a_user)
        torch.save(users.Net(), tmp_path / "model.pt")
        forget(module_of_a_user, tmp_path)
        (tmp_path / f"{module_of_a_user}.py").unlink()
        with pytest.raises(LoadError, match=r"cannot import users_network .ModuleNotFoundError"):
            load_model(tmp_path / "model.pt", trust=["users_network:Net"])

    def test_classes_of_a_script_cannot_be_imported(self, tmp_path: Path, monkeypatch: Any) -> None:
        class Net(nn.Sequential):
            pass

        Net.__module__, Net.__qualname__ = "__main__", "Net"
        monkeypatch.setattr(sys.modules["__main__"], "Net", Net, raising=False)
        torch.save(Net(), tmp_path / "model.pt")
        with pytest.raises(UntrustedError, match="defined in the script"):
            load_model(tmp_path / "model.pt")

    def test_functions_of_a_pickle_are_not_called_by_reading_it(self, tmp_path: Path) -> None:
        torch.save([functools.partial(print), RunsCommand(tmp_path / "x")], tmp_path / "model.pt")
        names = {name.dotted for name in read_content(examine(tmp_path / "model.pt")).pickle.names}
        assert names == {"functools.partial", "builtins.print", "posix.system"}

    @pytest.mark.parametrize(
        "option",
        [
            "cProfile:run",
            "timeit:timeit",
            "logging.config:dictConfig",
            "torch.serialization:load",
            "functools:partial",
        ],
    )
    def test_what_executes_is_no_class_of_data(self, option: str) -> None:
        with pytest.raises(ValueError, match="a file can do anything"):
            parse_trust(option)

    @pytest.mark.parametrize("what", ["build", "instance"])
    def test_functions_and_objects_are_not_trusted(
        self, tmp_path: Path, module_of_a_user: str, what: str
    ) -> None:
        source = tmp_path / f"{module_of_a_user}.py"
        source.write_text(
            source.read_text() + "def build(): return Net()\ninstance = Net\ninstance = Net()\n"
        )
        users = __import__(module_of_a_user)
        root = Call(GlobalName(module_of_a_user, what), a_tuple())
        save(tmp_path / "model.pt", pickled(root))
        with pytest.raises(UntrustedError, match="--trust takes classes only") as caught:
            load_model(tmp_path / "model.pt", trust=[f"{module_of_a_user}:{what}"])
        assert "add: --trust" not in str(caught.value)
        forget(module_of_a_user, tmp_path)
        with pytest.raises(UntrustedError, match="--trust takes classes only"):
            load_model(tmp_path / "model.pt")
        assert not (tmp_path / "imported").exists()
        assert users.Net

    def test_a_trusted_class_is_called_only_where_its_pickles_do_so(
        self, tmp_path: Path, module_of_a_user: str
    ) -> None:
        root = Call(GlobalName(module_of_a_user, "Net"), a_tuple())
        with pytest.raises(LoadError, match=f"it calls {module_of_a_user}.Net"):
            load_model(save(tmp_path / "model.pt", pickled(root)), trust=[f"{module_of_a_user}:Net"])

    def test_the_option_is_taken_apart(self) -> None:
        assert parse_trust("a.b:C.D") == ("a.b", "C.D")
        for wrong in ("a.b", "a.b:", ":C", "a b:C", "a:C:D", "a..b:C", ""):
            with pytest.raises(ValueError, match="module:Class"):
                parse_trust(wrong)
