"""Loading and saving networks: what loads, what is refused and why; nothing untrusted is executed."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading_cases import LEGACY, generator, same
from torch import nn

import tconv_swap
from tconv_swap.files.loading import LoadError, load_model
from tconv_swap.surgery import swap_layers


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

    def test_a_legacy_network_with_an_attribute_named_module(self, tmp_path: Path) -> None:
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
    def test_tensors_of_a_missing_gpu_are_loaded_to_the_cpu(self, tmp_path: Path) -> None:
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
    def test_files_that_hold_no_network(
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

    def test_a_permission_error_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def test_a_module_without_its_state(self, tmp_path: Path, attributes: dict[str, Any]) -> None:
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
