"""The command line: what is written and when, exit codes, output for people and for programs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import files, generator, run, saved_generator, swap, wrong
from torch import nn

import tconv_swap
from tconv_swap import op
from tconv_swap.cli import demo_network, workflow
from tconv_swap.cli.outcome import ExitCode
from tconv_swap.verification import Check, VerifyReport


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A saved generator in an otherwise empty working directory."""
    monkeypatch.chdir(tmp_path)
    return saved_generator()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that finds nothing wrong, for tests of everything around it."""
    check = Check("eval", "output", "", 0.0, 0.0, 1.0, True)
    monkeypatch.setattr(workflow, "verify", lambda *_, **__: VerifyReport([check]))


class TestSwap:
    def test_a_verified_network_is_written_and_loads_with_the_two_lines(self, model: Path) -> None:
        result = swap(model, "--out", "fast.pt")
        assert result.exit_code == 0, result.output
        assert "VERIFIED" in result.stdout
        lines = [line.strip() for line in result.stdout.strip().splitlines()[-2:]]
        assert lines[0] == "import torch, tconv_swap"
        names: dict[str, Any] = {}
        exec("\n".join(lines), names)
        fast, original = names["model"], generator()
        assert isinstance(fast[0], tconv_swap.ConvTranspose2d)
        x = torch.randn(2, 4, 1, 1)
        torch.testing.assert_close(fast.eval()(x), original.eval()(x))
        assert files() == ["fast.pt", "model.pt"]

    @pytest.mark.usefixtures("quick")
    def test_swap_may_be_written_out(self, model: Path) -> None:
        assert swap("swap", model, "--out", "fast.pt").exit_code == 0
        assert Path("fast.pt").exists()

    @pytest.mark.usefixtures("quick")
    def test_options_may_come_first(self, model: Path) -> None:
        assert swap("--out", "fast.pt", model).exit_code == 0
        assert Path("fast.pt").exists()

    def test_a_file_with_the_name_of_a_subcommand(self, model: Path) -> None:
        model.rename("demo")
        assert "ConvTranspose2d" in run("./demo", "--dry-run").stdout
        assert "ConvTranspose2d" in run("swap", "demo", "--dry-run").stdout

    @pytest.mark.usefixtures("quick")
    def test_without_out_a_note_says_that_nothing_was_written(self, model: Path) -> None:
        result = swap(model)
        assert result.exit_code == 0
        assert "nothing was written" in result.stdout
        assert files() == ["model.pt"]

    def test_a_swapped_file_can_be_swapped_again(self, model: Path) -> None:
        assert swap(model, "--out", "fast.pt").exit_code == 0
        again = swap("fast.pt", "--out", "again.pt")
        assert again.exit_code == 0, again.output
        assert "2 of 2 transposed convolutions" in again.stdout
        first, second = (torch.load(name, weights_only=False) for name in ("fast.pt", "again.pt"))
        assert [type(a) for a in first] == [type(b) for b in second]
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))

    @pytest.mark.usefixtures("quick")
    def test_the_saved_network_keeps_the_devices_and_dtypes_of_the_file(self, model: Path) -> None:
        original = generator().eval()
        original[0].requires_grad_(False)
        original.note = {"epoch": 3}
        torch.save(original, model)
        result = swap(model, "--out", "fast.pt", "--dtype", "float64", "--channels-last")
        assert result.exit_code == 0, result.output
        assert "float64" in result.stdout
        fast = torch.load("fast.pt", weights_only=False)
        assert {p.dtype for p in fast.parameters()} == {torch.float32}
        assert fast[3].weight.is_contiguous()
        assert not fast[0].weight.requires_grad
        assert not fast.training
        assert fast.note == {"epoch": 3}
        assert all(
            torch.equal(value, original.state_dict()[name]) for name, value in fast.state_dict().items()
        )

    @pytest.mark.usefixtures("quick")
    def test_include_and_exclude(self, model: Path) -> None:
        assert swap(model, "--exclude", "0", "--out", "fast.pt").exit_code == 0
        kinds = [type(layer) for layer in torch.load("fast.pt", weights_only=False)]
        assert kinds[0] is nn.ConvTranspose2d
        assert kinds[3] is tconv_swap.ConvTranspose2d
        assert swap(model, "--include", "3", "--include", "nothing", "--out", "fast.pt").exit_code == 0
        assert type(torch.load("fast.pt", weights_only=False)[0]) is nn.ConvTranspose2d

    @pytest.mark.usefixtures("quick")
    def test_legacy_file(self, model: Path) -> None:
        torch.save(generator(), model, _use_new_zipfile_serialization=False)
        assert swap(model, "--out", "fast.pt").exit_code == 0

    def test_timing(self, model: Path) -> None:
        arguments = (model, "--device", "cpu", "--warmup", 1, "--iters", 3, "--json", "-")
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        timing = json.loads(result.stdout)["benchmark"]
        assert {entry["stage"] for entry in timing["network"]} == {"forward", "backward", "step"}
        forward_only = json.loads(run(*arguments, "--no-backward").stdout)
        assert {entry["stage"] for entry in forward_only["benchmark"]["network"]} == {"forward"}
        assert not any("grad" in check["kind"] for check in forward_only["verification"]["checks"])


class TestInputs:
    @pytest.mark.usefixtures("quick")
    def test_inferred_shape_is_reported(self, model: Path) -> None:
        assert "2x4x1x1 float32 (inferred from 0" in swap(model).stdout

    @pytest.mark.usefixtures("quick")
    def test_given_shape(self, model: Path) -> None:
        assert "3x4x2x5 float32" in swap(model, "--input-shape", "3,4,2,5").stdout
        assert "3x4x2x5 float32" in swap(model, "--input-shape", "3x4x2x5").stdout

    def test_the_seed_decides_the_numbers(self, model: Path) -> None:
        def errors(seed: int) -> Any:
            found = json.loads(swap(model, "--seed", seed, "--json", "-").stdout)
            return [check["error_original"] for check in found["verification"]["checks"]]

        assert errors(1) == errors(1)
        assert errors(1) != errors(2)

    @pytest.mark.usefixtures("quick")
    def test_inputs_from_a_file(self, model: Path) -> None:
        torch.save({"input": torch.randn(1, 4, 3, 3)}, "inputs.pt")
        result = swap(model, "--inputs", "inputs.pt")
        assert result.exit_code == 0, result.output
        assert "input 1x4x3x3 float32 (read from inputs.pt)" in result.stdout

    def test_a_shape_the_network_does_not_take(self, model: Path) -> None:
        result = swap(model, "--input-shape", "2,3,4,4")
        assert result.exit_code == ExitCode.USAGE
        assert "does not run on 2x3x4x4" in result.stderr

    def test_shapes_and_inputs_exclude_each_other(self, model: Path) -> None:
        assert swap(model, "--inputs", "x.pt", "--input-shape", "1,4,1,1").exit_code == ExitCode.USAGE

    def test_no_shape_can_be_found(self, model: Path) -> None:
        torch.save(nn.Sequential(nn.Linear(3, 2), nn.Linear(4, 2), nn.ConvTranspose2d(4, 2, 2)), model)
        result = swap(model)
        assert result.exit_code == ExitCode.USAGE
        assert "give --input-shape" in result.stderr

    def test_a_file_without_inputs_is_refused(self, model: Path) -> None:
        assert swap(model, "--inputs", model).exit_code == ExitCode.CANNOT_LOAD


class TestMismatch:
    def test_nothing_is_written_and_the_layer_is_named(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(op, "conv_transpose2d", wrong)
        Path("fast.pt").write_text("as before")
        result = swap(model, "--out", "fast.pt")
        assert result.exit_code == ExitCode.MISMATCH
        assert "MISMATCH" in result.stdout
        assert "nothing was written" in result.stdout
        assert "first layer that diverges: layer 0" in " ".join(result.stdout.split())
        assert Path("fast.pt").read_text() == "as before"
        assert files() == ["fast.pt", "model.pt"]

    def test_quiet_still_prints_errors(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op, "conv_transpose2d", wrong)
        result = swap(model, "--out", "fast.pt", "--quiet")
        assert result.exit_code == ExitCode.MISMATCH
        assert result.stdout == ""
        assert result.stderr.startswith("tconv-swap: error: mismatch: ")
        assert files() == ["model.pt"]

    def test_given_tolerances(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(op, "conv_transpose2d", wrong)
            assert swap(model, "--rtol", "1", "--atol", "1").exit_code == 0
        assert swap(model, "--atol", "0").exit_code == ExitCode.MISMATCH

    def test_backend(self, model: Path) -> None:
        assert swap(model, "--backend", "native", "--out", "fast.pt").exit_code == 0
        assert torch.load("fast.pt", weights_only=False)[0].tconv_backend == "native"
        assert swap("fast.pt", "--out", "again.pt").exit_code == 0
        assert torch.load("again.pt", weights_only=False)[0].tconv_backend == "native"
        refused = swap(model, "--backend", "cudnn")
        assert refused.exit_code == ExitCode.USAGE
        assert "expected one of auto, rules, kernel" in refused.stderr


class TestTune:
    def test_on_the_cpu_there_is_nothing_to_tune(self, model: Path) -> None:
        result = run("tune", model, "--device", "cpu")
        assert result.exit_code == 0
        assert "nothing to tune" in result.stdout
        assert files() == ["model.pt"]
        told = json.loads(run("tune", model, "--device", "cpu", "--json", "-").stdout)
        assert (told["outcome"], told["problems"], told["exit_code"]) == ("tuned", [], 0)

    def test_tune_reports_errors_like_swap(self, model: Path) -> None:
        assert run("tune", "none.pt").exit_code == ExitCode.CANNOT_LOAD
        assert run("tune", model, "--input-shape", "1,2").exit_code == ExitCode.USAGE
        torch.save(nn.Sequential(nn.Linear(1, 1)), model)
        result = run("tune", model, "--device", "cpu")
        assert result.exit_code == ExitCode.NOTHING_TO_SWAP
        assert "nothing to tune" in result.stderr


class TestDryRunAndNothingToSwap:
    def test_dry_run_prints_the_plan_and_runs_nothing(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workflow, "verify", None)
        result = run(model, "--dry-run", "--out", "fast.pt")
        assert result.exit_code == 0
        assert "0: ConvTranspose2d 4->3 k4" in result.stdout
        assert files() == ["model.pt"]

    @pytest.mark.parametrize("arguments", [(), ("--dry-run",), ("--out", "fast.pt")])
    def test_nothing_to_swap(self, model: Path, arguments: tuple[str, ...]) -> None:
        torch.save(nn.Sequential(nn.Linear(1, 1)), model)
        result = run(model, *arguments)
        assert result.exit_code == ExitCode.NOTHING_TO_SWAP
        assert "nothing to swap" in result.stdout
        assert files() == ["model.pt"]

    def test_a_pattern_that_matches_nothing(self, model: Path) -> None:
        result = run(model, "--include", "decoder.*")
        assert result.exit_code == ExitCode.NOTHING_TO_SWAP
        assert "pattern 'decoder.*' matches no transposed convolution" in result.stdout


@pytest.mark.usefixtures("quick")
class TestFiles:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [(b"", "is empty"), (b"PK\x03\x04 and no more", "truncated"), (b"text", "unknown format")],
    )
    def test_a_file_that_cannot_be_loaded_gives_one_line(
        self, model: Path, content: bytes, reason: str
    ) -> None:
        model.write_bytes(content)
        result = run(model, "--quiet", "--out", "fast.pt")
        assert result.exit_code == ExitCode.CANNOT_LOAD
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1
        assert result.stdout == ""
        assert files() == ["model.pt"]

    def test_a_state_dict_and_a_missing_file_and_a_directory(self, model: Path) -> None:
        torch.save(generator().state_dict(), model)
        Path("directory").mkdir()
        for path, reason in (
            (model, "state_dict"),
            ("nothing.pt", "no such file"),
            ("directory", "directory"),
        ):
            result = run(path, "-q")
            assert result.exit_code == ExitCode.CANNOT_LOAD
            assert reason in result.stderr

    def test_a_mistyped_subcommand(self, model: Path) -> None:
        assert "did you mean the command 'demo'?" in run("dmeo").stderr

    def test_untrusted_classes_are_listed_with_the_options_that_help(self, model: Path) -> None:
        torchvision = pytest.importorskip("torchvision")
        net = torchvision.ops.Conv2dNormActivation(3, 3)
        torch.save(nn.Sequential(net, nn.ConvTranspose2d(3, 2, 2)), model)
        result = run(model, "--dry-run", "-q")
        assert result.exit_code == ExitCode.CANNOT_LOAD
        option = "--trust torchvision.ops.misc:Conv2dNormActivation"
        assert result.stderr.rstrip().endswith(option)
        assert run(model, "--dry-run", *option.split()).exit_code == 0
        assert run(model, "--dry-run", "--unsafe-pickle").exit_code == 0
        assert swap(model, "--out", "fast.pt", *option.split()).exit_code == 0

    @pytest.mark.parametrize("link", [os.symlink, os.link, None])
    def test_the_input_is_never_overwritten(self, model: Path, link: Any) -> None:
        before = model.read_bytes()
        out = Path("other.pt") if link else model
        if link:
            link(model, out)
        result = swap(model, "--out", out)
        assert result.exit_code == ExitCode.USAGE
        assert "is the input itself" in result.stderr
        assert model.read_bytes() == before

    def test_a_failure_while_writing_leaves_nothing(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full_disk(network: nn.Module, stream: Any) -> None:
            stream.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(torch, "save", full_disk)
        result = swap(model, "--out", "fast.pt")
        assert result.exit_code == ExitCode.CANNOT_WRITE
        assert "No space left on device" in result.stderr
        assert files() == ["model.pt"]

    def test_the_output_is_read_back_before_it_is_renamed(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save = torch.save
        monkeypatch.setattr(torch, "save", lambda network, stream: save(network[:2], stream))
        result = swap(model, "--out", "fast.pt")
        assert result.exit_code == ExitCode.CANNOT_WRITE
        assert "is not the same" in result.stderr
        assert files() == ["model.pt"]


class TestJson:
    def test_only_json_on_stdout(self, model: Path) -> None:
        result = swap(model, "--json", "-", "--out", "fast.pt")
        found = json.loads(result.stdout)
        assert found["outcome"] == "verified"
        assert found["exit_code"] == 0
        assert found["verification"]["passed"] is True
        assert found["benchmark"] is None
        assert found["facts"]["output"] == "fast.pt"
        assert [layer["names"] for layer in found["plan"]["layers"]] == [["0"], ["3"]]

    @pytest.mark.usefixtures("quick")
    def test_json_to_a_file_beside_the_report(self, model: Path) -> None:
        result = swap(model, "--json", "result.json")
        assert "VERIFIED" in result.stdout
        assert json.loads(Path("result.json").read_text())["outcome"] == "verified"

    def test_failures_are_json_too(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = json.loads(run("nothing.pt", "--json", "-").stdout)
        assert (found["outcome"], found["exit_code"]) == ("error", 3)
        assert "no such file" in found["error"]
        monkeypatch.setattr(op, "conv_transpose2d", lambda input, *_: input * torch.nan)
        result = swap(model, "--json", "-")
        found = json.loads(result.stdout, parse_constant=pytest.fail)
        assert (found["outcome"], found["exit_code"], result.exit_code) == ("mismatch", 1, 1)

    @pytest.mark.parametrize("target", ["model.pt", "fast.pt", "nowhere/result.json"])
    def test_impossible_targets_are_refused(self, model: Path, target: str) -> None:
        before = model.read_bytes()
        result = swap(model, "--out", "fast.pt", "--json", target)
        assert result.exit_code == ExitCode.USAGE
        assert model.read_bytes() == before
        assert files() == ["model.pt"]


class TestDemo:
    @pytest.mark.usefixtures("quick")
    def test_demo_swaps_the_file_that_it_saved(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo_network, "CHANNELS", (16, 8, 6, 4))
        result = swap("demo", "--dir", "new/demo")
        assert result.exit_code == 0, result.output
        assert "5 of 5 transposed convolutions swapped" in result.stdout
        assert sorted(path.name for path in Path("new/demo").iterdir()) == ["dcgan-fast.pt", "dcgan.pt"]
        assert run("new/demo/dcgan.pt", "--dry-run").exit_code == 0

    def test_the_generator_is_dcgans(self) -> None:
        generator = demo_network.dcgan_generator()
        with torch.device("meta"):
            assert generator.to("meta")(torch.empty(2, 100, 1, 1)).shape == (2, 3, 64, 64)
        assert sum(p.numel() for p in generator.parameters()) == 3_576_704
        assert all(type(m).__module__.startswith("torch.nn.modules.") for m in generator.modules())

    def test_the_seed_decides_the_weights_and_not_the_global_state(self, tmp_path: Path) -> None:
        before = torch.get_rng_state()
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            demo_network.write_generator(tmp_path / name, seed)
        first, again, other = (torch.load(tmp_path / n, weights_only=False)[0].weight for n in "abc")
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(torch.get_rng_state(), before)

    def test_an_impossible_directory_is_refused(self, model: Path) -> None:
        result = run("demo", "--dir", model / "demo")
        assert result.exit_code == ExitCode.CANNOT_WRITE
