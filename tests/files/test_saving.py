"""Files of inputs; saving: whole or not there, read back, and what cannot be written to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from loading_cases import RunsCommand, generator, same
from torch import Tensor, nn

from tconv_swap.files.loading import LoadError, load_inputs, load_model
from tconv_swap.files.saving import SaveError, check_target, save_model
from tconv_swap.surgery import swap_layers


class TestInputsFile:
    def test_tensors_and_containers(self, tmp_path: Path) -> None:
        torch.save({"x": torch.ones(2), "sizes": [(1, 2)]}, tmp_path / "inputs.pt")
        inputs = load_inputs(tmp_path / "inputs.pt")
        assert inputs.kwargs["sizes"] == [(1, 2)]
        assert torch.equal(inputs.kwargs["x"], torch.ones(2))

    def test_anything_that_executes_is_refused(self, tmp_path: Path) -> None:
        torch.save([torch.ones(2), RunsCommand(tmp_path / "executed")], tmp_path / "inputs.pt")
        with pytest.raises(LoadError, match=r"more than tensors.*posix\.system"):
            load_inputs(tmp_path / "inputs.pt")
        assert not (tmp_path / "executed").exists()

    def test_a_network_is_not_an_input(self, tmp_path: Path) -> None:
        torch.save(generator(), tmp_path / "inputs.pt")
        with pytest.raises(LoadError, match="more than tensors"):
            load_inputs(tmp_path / "inputs.pt")

    def test_something_else(self, tmp_path: Path) -> None:
        torch.save(3, tmp_path / "inputs.pt")
        with pytest.raises(LoadError, match="must be a tensor"):
            load_inputs(tmp_path / "inputs.pt")


class TestSaving:
    def left_in(self, directory: Path) -> list[str]:
        return sorted(path.name for path in directory.iterdir())

    def test_round_trip(self, tmp_path: Path) -> None:
        model = swap_layers(generator())
        save_model(model, tmp_path / "fast.pt")
        assert same(load_model(tmp_path / "fast.pt").model, model)
        assert self.left_in(tmp_path) == ["fast.pt"]

    def test_permissions(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            save_model(generator(), tmp_path / "new.pt")
            (tmp_path / "old.pt").touch(0o600)
            save_model(generator(), tmp_path / "old.pt")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "new.pt").stat().st_mode) == 0o640
        assert stat.S_IMODE((tmp_path / "old.pt").stat().st_mode) == 0o600

    def test_a_symbolic_link_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "real.pt").touch()
        (tmp_path / "link.pt").symlink_to("real.pt")
        save_model(generator(), tmp_path / "link.pt")
        assert (tmp_path / "link.pt").is_symlink()
        assert same(load_model(tmp_path / "real.pt").model, generator())

    @pytest.mark.parametrize(
        "failure",
        [
            OSError(errno.ENOSPC, "No space left on device"),
            RuntimeError("unexpected pos"),
            KeyboardInterrupt(),
        ],
    )
    def test_a_failure_in_the_middle_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
    ) -> None:
        target = tmp_path / "fast.pt"
        target.write_text("as before")

        def half(model: nn.Module, stream: Any) -> None:
            stream.write(b"half of it")
            stream.flush()
            assert len(self.left_in(tmp_path)) == 2
            raise failure

        monkeypatch.setattr(torch, "save", half)
        expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else SaveError
        with pytest.raises(expected):
            save_model(generator(), target)
        assert target.read_text() == "as before"
        assert self.left_in(tmp_path) == ["fast.pt"]

    def test_a_failed_check_keeps_the_old_file(self, tmp_path: Path) -> None:
        def check(temporary: Path) -> None:
            assert same(load_model(temporary).model, generator())
            raise SaveError("not good enough")

        with pytest.raises(SaveError, match="not good enough"):
            save_model(generator(), tmp_path / "fast.pt", check=check)
        assert self.left_in(tmp_path) == []

    def test_objects_that_cannot_be_pickled_are_refused(self, tmp_path: Path) -> None:
        model = generator()
        model.function = lambda: None
        with pytest.raises(SaveError, match="cannot be written"):
            save_model(model, tmp_path / "fast.pt")
        assert self.left_in(tmp_path) == []

    def test_impossible_targets_are_refused(self, tmp_path: Path) -> None:
        source = tmp_path / "model.pt"
        source.touch()
        (tmp_path / "link.pt").symlink_to(source)
        os.link(source, tmp_path / "hard.pt")
        (tmp_path / "directory").mkdir()
        for name in ("model.pt", "link.pt", "hard.pt", "directory/../model.pt"):
            with pytest.raises(SaveError, match="is the input itself"):
                check_target(tmp_path / name, source)
        for name, reason in (
            ("directory", "is a directory"),
            ("nowhere/fast.pt", "is not a directory"),
            ("model.pt/fast.pt", "cannot be written"),
            ("/dev/null", "not a regular file"),
            ("a\0b", "cannot be written"),
        ):
            with pytest.raises(SaveError, match=reason):
                check_target(tmp_path / name, source)
        check_target(tmp_path / "fast.pt", source)
        assert self.left_in(tmp_path) == ["directory", "hard.pt", "link.pt", "model.pt"]

    def test_a_directory_that_is_not_writable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(SaveError, match="no permission"):
            check_target(tmp_path / "fast.pt", tmp_path / "model.pt")


def test_loaded_weights_are_those_saved(tmp_path: Path) -> None:
    model = generator().to(memory_format=torch.channels_last)
    save_model(model, tmp_path / "model.pt")
    loaded: Any = load_model(tmp_path / "model.pt").model
    weight: Tensor = loaded[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(weight, model[0].weight)
