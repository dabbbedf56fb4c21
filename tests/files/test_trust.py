"""What a file may have executed: nothing but what the user names."""

from __future__ import annotations

import functools
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    def test_names_that_can_do_anything_cannot_be_trusted(self, tmp_path: Path, name: str) -> None:
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

    def test_a_trusted_module_that_does_not_exist(self, tmp_path: Path, module_of_a_user: str) -> None:
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
    def test_classes_that_execute_code_cannot_be_trusted(self, option: str) -> None:
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

    def test_a_trusted_class_is_called_only_if_its_pickles_call_it(
        self, tmp_path: Path, module_of_a_user: str
    ) -> None:
        root = Call(GlobalName(module_of_a_user, "Net"), a_tuple())
        with pytest.raises(LoadError, match=f"it calls {module_of_a_user}.Net"):
            load_model(save(tmp_path / "model.pt", pickled(root)), trust=[f"{module_of_a_user}:Net"])

    def test_the_trust_option_is_parsed(self) -> None:
        assert parse_trust("a.b:C.D") == ("a.b", "C.D")
        for wrong in ("a.b", "a.b:", ":C", "a b:C", "a:C:D", "a..b:C", ""):
            with pytest.raises(ValueError, match="module:Class"):
                parse_trust(wrong)
