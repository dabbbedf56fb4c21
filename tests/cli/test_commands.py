"""The commands beside `swap`: bench, explain; failures as documents; completion, and answers to misspelt words."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from cli_cases import finished, process, run
from sampling import sampled
from torch import Tensor, nn

import tconv_swap
from tconv_swap import op
from tconv_swap.cli import workflow
from tconv_swap.measurement.suite import load_suite
from tconv_swap.report import json_schema


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = nn.Sequential(nn.ConvTranspose2d(100, 64, 4), nn.ReLU(), nn.ConvTranspose2d(64, 8, 4, 2, 1))
    torch.save(network, "model.pt")
    return Path("model.pt")


class TestBench:
    def test_a_layer_checked_and_timed(self, tmp_path: Path) -> None:
        target = tmp_path / "r.json"
        result = run("bench", "--only", "dcgan1,kb57", "--device", "cpu", "--iters", "2", "--json", target)
        assert result.exit_code == 0, result.output
        found = json.loads(target.read_text())
        jsonschema.validate(found, json_schema())
        assert found["outcome"] == "verified"
        rows = found["benchmark"]["layers"]
        assert [(row["name"], row["stage"]) for row in rows] == [
            ("dcgan1", "forward"),
            ("dcgan1", "backward"),
        ]
        assert rows[0]["input_shape"] == [128, 100, 1, 1]
        assert rows[0]["original"]["samples"] == 2
        kinds = {(one["name"], one["kind"]) for one in found["verification"]["checks"]}
        wanted = ("layer_output", "layer_grad_input", "layer_grad_weight")
        assert kinds == {("dcgan1", kind) for kind in wanted}
        assert found["explanation"]["layers"][0]["name"] == "dcgan1"
        notes = " ".join(found["facts"]["warnings"])
        assert "left out, too large for a CPU: kb57" in notes
        assert "on geometric mean over 1 layers" in notes

    def test_a_wrong_layer_is_a_mismatch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = op.conv_transpose2d

        def wrong(input: Tensor, weight: Tensor, *others: Any) -> Tensor:
            return right(input, weight * 1.001, *others)

        monkeypatch.setattr(op, "conv_transpose2d", wrong)
        result = run("bench", "--only", "dcgan1", "--device", "cpu", "--iters", "1", "--no-backward")
        assert result.exit_code == 1, result.output
        assert "MISMATCH" in result.stdout

    def test_in_sixteen_bits_channels_last_without_checks(self, tmp_path: Path) -> None:
        options = ("--dtype", "bf16", "--channels-last", "--no-verify", "--no-backward", "--iters", "1")
        result = run("bench", "--only", "dcgan5", "--device", "cpu", *options, "--json", "-")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        (row,) = found["benchmark"]["layers"]
        assert (row["dtype"], row["memory_format"]) == ("bfloat16", "channels_last")
        assert row["input_shape"][0] < 128, "the batch is cut on a CPU"
        assert found["verification"] is None
        assert found["outcome"] == "not_verified"

    def test_the_list(self) -> None:
        lines = run("bench", "--list").stdout.splitlines()
        assert [line.split()[0] for line in lines] == [layer.name for layer in load_suite().layers]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--only", "nothing"), "no such layer: nothing; the suite has kb57"),
            (("--dtype", "int8"), "expected one of tf32, fp16, bf16, fp32"),
            (("--device", "meta"), "run on cpu and cuda only"),
            (("--backend", "cudnn"), "expected one of auto, rules, kernel"),
            (("--report", "r.pdf"), "ends in .md or .html"),
        ],
    )
    def test_wrong_usage(self, options: tuple[str, ...], words: str) -> None:
        result = run("bench", *options)
        assert result.exit_code == 2
        assert words in result.stderr

    @pytest.mark.parametrize("option", ["--report", "--json"])
    def test_impossible_outputs_are_refused_before_any_work(
        self, option: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tconv_swap.cli.commands.bench.run_suite", None)
        result = run("bench", "--only", "dcgan1", option, "/nowhere/b.html")
        assert result.exit_code == 2
        assert f"{option}: /nowhere/b.html cannot be written: /nowhere is not a directory" in result.stderr

    def test_a_pipe_may_be_written_to(self) -> None:
        with process("bench", "--only", "nothing", "--json", "/dev/stdout") as running:
            assert running.stdout is not None
            assert json.load(running.stdout)["outcome"] == "error"

    def test_interrupted_it_leaves_nothing_half_written_and_exits_130(self, tmp_path: Path) -> None:
        target = tmp_path / "r.json"
        arguments = ("bench", "--device", "cpu", "--seconds", "5", "--no-verify", "--json", str(target))
        with process(*arguments) as running:
            assert running.stderr is not None
            for line in running.stderr:
                if "measuring" in line:
                    break
            running.send_signal(signal.SIGINT)
            assert f"interrupted; written: {target}\n" in running.stderr.read()
        assert running.returncode == 130
        assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
        found = json.loads(target.read_text())
        assert (found["outcome"], found["exit_code"]) == ("error", 130)
        assert found["error"] == f"interrupted; written: {target}"


class TestExplain:
    def test_explains_for_another_gpu_without_data(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        devices = []
        pair = workflow.original_and_swapped
        monkeypatch.setattr(
            workflow, "original_and_swapped", lambda *given: (devices.append(str(given[2])), pair(*given))[1]
        )
        result = run("explain", model, "--arch", "sm_90a", "--input-shape", "32,100,1,1")
        assert result.exit_code == 0, result.output
        assert devices == ["meta"]
        assert "inputs: 32x100x1x1 float32 (--input-shape" in result.stdout
        assert re.search(r"^0: 32x100x1x1, 100->64 k4 s1, .* sm_90a$", result.stdout, flags=re.MULTILINE)
        assert re.search(r"forward_\w+: \d+ blocks of \d+ threads", result.stdout)
        assert "note:" not in result.stdout

    def test_the_same_as_in_python(self, model: Path) -> None:
        shape = (2, 100, 1, 1)
        result = run("explain", model, "--arch", "sm_80", "--input-shape", "2,100,1,1", "--json", "-")
        assert result.exit_code == 0, result.output
        network = tconv_swap.swap_layers(torch.load(model, weights_only=False))
        expected = tconv_swap.explain(network, torch.zeros(shape), architecture="sm_80").to_dict()
        assert json.loads(result.stdout)["explanation"] == json.loads(json.dumps(expected))

    def test_on_the_cpu(self, model: Path) -> None:
        result = run("explain", model, "--device", "cpu", "--no-backward")
        assert result.exit_code == 0, result.output
        assert "inferred from 0" in result.stdout
        assert "forward: outer" in result.stdout
        assert "grad_weight" not in result.stdout

    def test_nothing_to_swap(self, model: Path) -> None:
        torch.save(nn.Linear(2, 2), model)
        result = run("explain", model)
        assert result.exit_code == 4
        assert "no layer of the model is a transposed convolution" in result.stdout

    @pytest.mark.parametrize(
        ("options", "code", "words"),
        [
            (("--arch", "sm_10"), 2, "expected one of sm_75"),
            (("--input-shape", "1,2,3,4"), 2, "the network does not run"),
            (("--input-shape", "1,100,1,1", "--inputs", "x.pt"), 2, "not both"),
        ],
    )
    def test_wrong_usage(self, model: Path, options: tuple[str, ...], code: int, words: str) -> None:
        result = run("explain", model, *options)
        assert result.exit_code == code
        assert words in " ".join(result.stderr.split())

    def test_a_file_that_is_not_a_network(self, model: Path) -> None:
        model.write_bytes(b"no network")
        assert run("explain", model).exit_code == 3


class TestFailuresAreDocuments:
    @pytest.mark.parametrize(
        ("command", "code", "words"),
        [
            ("explain nothing.pt", 3, "no such file"),
            ("explain model.pt --arch sm_10", 2, "expected one of sm_75"),
            ("bench --only nope", 2, "no such layer: nope"),
            ("bench --only nope --report r.txt", 2, "ends in .md or .html"),
            ("model.pt --report r.txt", 2, "ends in .md or .html"),
            ("tune nothing.pt", 3, "no such file"),
        ],
    )
    @pytest.mark.parametrize("target", ["-", "r.json"])
    def test_in_the_json(self, model: Path, command: str, code: int, words: str, target: str) -> None:
        result = run(*command.split(), "--json", target)
        assert result.exit_code == code
        found = json.loads(result.stdout if target == "-" else Path(target).read_text())
        assert (found["outcome"], found["exit_code"]) == ("error", code)
        assert words in found["error"]
        assert words in result.stderr

    @pytest.mark.parametrize("target", ["model.pt", "fast.pt", "a.md", "nowhere/r.json"])
    def test_failures_do_not_overwrite_other_files(self, model: Path, target: str) -> None:
        before = model.read_bytes()
        others = ("--out", "fast.pt", "--report", "a.md", "--report", "r.txt")
        assert run(model, *others, "--json", target).exit_code == 2
        assert [path.name for path in Path().iterdir()] == ["model.pt"]
        assert model.read_bytes() == before


class TestWords:
    @pytest.mark.parametrize(
        ("arguments", "answer"),
        [
            (("model.pt", "--devise", "cpu"), "--device"),
            (("bench", "--onyl", "x"), "--only"),
            (("explain", "model.pt", "--input-shpe", "1,2"), "--input-shape"),
            (("cache", "claer"), "clear"),
            (("benhc",), "did you mean the command 'bench'?"),
            (("doctro",), "did you mean the command 'doctor'?"),
            (("explian", "model.pt", "--arch", "sm_90a"), "Did you mean 'explain'?"),
            (("swpa", "model.pt"), "Did you mean 'swap'?"),
        ],
    )
    def test_a_misspelt_command_is_answered_with_the_right_one(
        self, arguments: tuple[str, ...], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = run(*arguments)
        assert result.exit_code in (2, 3)
        assert answer in result.stderr

    @pytest.mark.parametrize(
        ("words", "expected"),
        sampled(
            [
                ("tconv-swap cache ", {"clear"}),
                ("tconv-swap b", {"bench"}),
                ("tconv-swap bench --no-", {"--no-backward", "--no-verify"}),
                ("tconv-swap model.pt --inc", {"--include", "--include-1d"}),
            ],
            3,
        ),
    )
    def test_completion(self, words: str, expected: set[str]) -> None:
        place = str(len(words.split(" ")) - 1)
        environment = {"_TCONV_SWAP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": place}
        assert set(finished(**environment).stdout.split()) == expected

    @pytest.mark.parametrize(
        "command", ["swap", "demo", "bench", "explain", "doctor", "cache", "cache clear"]
    )
    def test_every_help_says_what_the_command_does(self, command: str) -> None:
        result = run(*command.split(), "--help")
        assert result.exit_code == 0
        assert len(result.stdout.split()) > 25
        if command not in ("cache", "cache clear"):
            assert "Exit codes" in result.stdout
