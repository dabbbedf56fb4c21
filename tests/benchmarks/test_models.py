"""The benchmark of whole networks, tiny and on the CPU: its rows, its list of what is missing, its table and chart."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import tconv_swap
from benchmarks import models, models_report, models_row
from benchmarks.networks import NETWORKS, Network
from tconv_swap.inputs import Inputs

TRANSFORMERS = ("sam", "dpt", "vitpose")
LAYERS = {
    "dcgan": 5,
    "pix2pix": 8,
    "cyclegan": 2,
    "vae": 4,
    "unet": 4,
    "simplebaseline": 3,
    "maskrcnn": 1,
    "sam": 2,
    "dpt": 2,
    "vitpose": 2,
}


def run(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = models.main(["--device", "cpu", "--tiny", "--iters", "1", "--json", str(path), *options])
    return code, json.loads(path.read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("models") / "rows.json"
    # float16 on a CPU takes seconds a layer: the networks are run in it by hand, on a GPU.
    networks = ("--network", "dcgan", "--network", "unet")
    code, document = run(path, *networks, "--precision", "tf32", "--runtime", "eager")
    assert code == 0
    return document


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_networks_have_the_layers_that_are_published(network: Network) -> None:
    """In full, but on no device: nothing is computed."""
    if network.name in TRANSFORMERS:
        pytest.importorskip("transformers")
    with torch.device("meta"):
        plan = tconv_swap.plan_swap(network.build(False))
    assert len(plan.swapped) == len(plan.layers) == LAYERS[network.name]


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if name != "maskrcnn"]
)  # test_examples.py runs that
def test_networks_run_forward_and_backward(name: str) -> None:
    network = NETWORKS[name]
    if network.name in TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    built = network.build(True)
    inputs = Inputs.of(network.inputs(2, True, torch.device("cpu")))
    models_row.summed_loss(inputs(built.train())).backward()
    layers = [module for module in built.modules() if isinstance(module, nn.ConvTranspose2d)]
    assert all(layer.weight.grad is not None for layer in layers)


def test_rows(measured: dict[str, Any]) -> None:
    keys = {(row["network"], row["precision"], row["layout"]) for row in measured["rows"]}
    layouts = ("nchw", "channels_last")
    assert keys == {(name, "tf32", layout) for name in ("dcgan", "unet") for layout in layouts}
    for row in measured["rows"]:
        assert [stage["stage"] for stage in row["stages"]] == ["forward", "backward", "step"]
        assert all(0 < share <= 1 for share in row["share"].values())
        assert row["layers"] == (5 if row["network"] == "dcgan" else 2)
        assert 0 <= row["difference"] < models_row.MAX_DIFFERENCE
    assert measured["not_measured"] == []
    assert measured["settings"]["tiny"] is True


def test_float16_is_autocast() -> None:
    seen = []
    layer = nn.ConvTranspose2d(2, 2, 2)
    network = models_row.Autocast(nn.Sequential(layer), "cpu")
    layer.register_forward_hook(lambda *call: seen.append(call[-1].dtype))
    network(torch.zeros(1, 2, 3, 3))
    assert seen == [torch.float16]


def test_networks_that_compute_something_else_give_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap_layers = tconv_swap.swap_layers

    def broken(network: nn.Module) -> nn.Module:
        swap_layers(network)
        with torch.no_grad():
            next(m for m in network.modules() if isinstance(m, nn.ConvTranspose2d)).weight.mul_(1.01)
        return network

    monkeypatch.setattr(models_row.tconv_swap, "swap_layers", broken)
    one = ("--network", "vae", "--precision", "tf32", "--layout", "nchw", "--runtime", "eager")
    code, document = run(tmp_path / "rows.json", *one)
    assert code == 1
    assert document["rows"] == []
    assert "the outputs of a layer differ by" in document["not_measured"][0]


def test_resume_continues_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    two = ("--network", "vae", "--precision", "tf32", "--runtime", "eager")
    code, first = run(path, *two, "--layout", "nchw")
    assert code == 0
    asked = []
    measure = models.measure
    monkeypatch.setattr(
        models, "measure", lambda case, setting: (asked.append(case), measure(case, setting))[1]
    )
    code, both = run(path, *two, "--resume")
    assert code == 0
    assert [case.layout for case in asked] == ["channels_last"]
    assert both["rows"][0] == first["rows"][0]
    assert len(both["rows"]) == 2


def test_renew_measures_missing_rows_before_those_of_other_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "rows.json", []

    def measure(case: models.Case, _: models.Setting) -> dict[str, Any]:
        asked.append(case.layout)
        return {**case._asdict(), "stages": [], "share": {"forward": None, "step": None}}

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(models, "commit_of_tree", lambda: "old")
    options = ("--network", "vae", "--precision", "tf32", "--runtime", "eager")
    assert run(path, *options, "--layout", "nchw")[0] == 0
    monkeypatch.setattr(models, "commit_of_tree", lambda: "new")
    mixed = run(path, *options, "--resume")[1]
    assert [row["commit"] for row in mixed["rows"]] == ["old", "new"]
    assert "commits old (1 rows), new (1 rows)" in models_report.table(mixed)
    asked.clear()
    code, kept = run(path, *options, "--renew", "--seconds", "1e-9")
    assert (code, asked, kept["not_measured"], kept["rows"]) == (0, [], [], mixed["rows"])
    mixed["rows"].pop()
    path.write_text(json.dumps(mixed))
    code, renewed = run(path, *options, "--renew")
    assert code == 0
    assert asked == ["channels_last", "nchw"]
    assert [(row["layout"], row["commit"]) for row in renewed["rows"]] == [
        ("nchw", "new"),
        ("channels_last", "new"),
    ]
    assert ", commit new\n" in models_report.table(renewed)
    asked.clear()
    run(path, *options, "--renew")
    assert asked == []


def test_no_row_starts_after_the_time_limit(tmp_path: Path) -> None:
    code, document = run(tmp_path / "rows.json", "--network", "vae", "--seconds", "1e-9")
    assert code == 1
    assert document["rows"] == []
    assert document["not_measured"][0] == "vae tf32 nchw eager: no time left"


def test_a_lost_gpu_ends_the_run_and_its_case_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "rows.json", []
    measure = models.measure

    def breaks(case: models.Case, setting: models.Setting) -> dict[str, Any]:
        asked.append(case.network)
        if case.network == "unet":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure(case, setting)

    monkeypatch.setattr(models, "measure", breaks)
    monkeypatch.setattr(models, "_usable", lambda device: asked[-1] != "unet")
    options = ["--precision", "tf32", "--layout", "nchw", "--runtime", "eager"]
    for network in ("dcgan", "unet", "vae"):
        options += ["--network", network]
    code, first = run(path, *options)
    assert code == 1
    assert [row["network"] for row in first["rows"]] == ["dcgan"]
    assert "illegal memory access" in first["not_measured"][0]
    assert first["not_measured"][1:] == [f"vae tf32 nchw eager: {models.GPU_LOST}"]
    code, second = run(path, *options, "--resume")
    assert code == 1
    assert asked == ["dcgan", "unet", "vae", "unet"]
    assert [row["network"] for row in second["rows"]] == ["dcgan", "vae"]
    assert len(second["not_measured"]) == 1


def test_compiling_ahead_ends_with_its_time() -> None:
    begin = time.monotonic()
    setting = models.Setting(torch.device("cpu"), True, 1)
    models.compile_ahead([models.Case("vae", "tf32", "nchw", "compile")], setting, 1, 0.01)
    assert time.monotonic() - begin < 20
    assert active_children() == []


def test_the_graphs_compiled_ahead_are_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that nobody compiled ahead is compiled while the GPU waits."""
    graphs: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.add(graph.code)
        return make_boxed_func(graph.forward)

    def build(tiny: bool) -> nn.Module:
        return nn.Sequential(nn.Unflatten(1, (128, 1, 1)), nn.ConvTranspose2d(128, 4, 4), nn.ReLU())

    monkeypatch.setitem(NETWORKS, "vae", replace(NETWORKS["vae"], build=build))
    backend = aot_autograd(fw_compiler=keep)
    monkeypatch.setattr(models_row, "_compiled", lambda network: torch.compile(network, backend=backend))
    setting = models.Setting(torch.device("cpu"), True, 1)
    case = models.Case("vae", "tf32", "nchw", "compile")
    models.run_once(case, setting)
    ahead = set(graphs)
    torch.compiler.reset()
    models.measure(case, setting)
    assert ahead
    assert graphs == ahead


def test_an_interrupted_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    measure = models.measure

    def interrupted(case: models.Case, setting: models.Setting) -> dict[str, Any]:
        if case.layout == "channels_last":
            raise KeyboardInterrupt
        return measure(case, setting)

    monkeypatch.setattr(models, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(path, "--network", "vae", "--precision", "tf32", "--runtime", "eager")
    assert [row["layout"] for row in json.loads(path.read_text())["rows"]] == ["nchw"]


def test_the_committed_set() -> None:
    cases = list(models.every_case(models.make_parser().parse_args([])))
    eager = [case for case in cases if case.runtime == "eager"]
    compiled = [case for case in cases if case.runtime == "compile"]
    assert len(eager) == 4 * len(NETWORKS)
    assert len(compiled) == 4 * sum(not one.no_compile for one in NETWORKS.values())
    assert cases.index(compiled[0]) == len(eager)


def test_table(measured: dict[str, Any]) -> None:
    lines = models_report.table(measured).splitlines()
    assert sum(line.startswith(("dcgan ", "unet ")) for line in lines) == 4
    assert any(
        re.match(r"eager, forward: \d+\.\d\dx on geometric mean over 4 rows, ", line) for line in lines
    )
    assert max(map(len, lines)) <= 130


def test_a_forward_pass_replayed_has_a_column_where_one_was(measured: dict[str, Any]) -> None:
    first, *others = measured["rows"]
    document = {**measured, "rows": [{**first, "cuda_graph": {"speedup": 1.5}}, *others]}
    text = models_report.table(document)
    assert [
        line.endswith(" 1.50x") for line in text.splitlines() if line.startswith(("dcgan ", "unet "))
    ] == [
        True,
        *[False] * len(others),
    ]
    assert "eager, forward in a CUDA graph: 1.50x on geometric mean over 1 rows" in text
    assert "in a graph" in text
    assert "in a graph" not in models_report.table(measured)
    assert max(map(len, text.splitlines())) <= 130


class Graph:
    """In place of a CUDA graph: a replay computes ``y`` of ``x``."""

    def __init__(self, x: Tensor, y: Tensor, factor: float) -> None:
        self.x, self.y, self.factor = x, y, factor
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        if self.factor:
            torch.mul(self.x, self.factor, out=self.y)


def replayed(monkeypatch: pytest.MonkeyPatch, factor: float) -> tuple[Any, list[str], list[Graph]]:
    """What is found of networks that double their input, by graphs that multiply it."""
    graphs: list[Graph] = []

    def captured(_: nn.Module, inputs: Inputs) -> models_row.Captured:
        x = inputs.named_tensors()[0][1]
        y, count = torch.empty_like(x), torch.tensor(3)
        graphs.append(Graph(x, y, factor))
        return models_row.Captured(cast(Any, graphs[-1]), {"y": y, "n": count}, {"y": 2 * x, "n": count})

    monkeypatch.setattr(models_row, "_captured", captured)
    networks: dict[str, nn.Module] = {"original": nn.Identity(), "swapped": nn.Identity()}
    notes: list[str] = []
    setting = models.Setting(torch.device("cpu"), True, 2)
    return models_row.time_replayed(networks, Inputs.of(torch.randn(4, 4)), setting, notes), notes, graphs


def test_a_wrong_replay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found, notes, graphs = replayed(monkeypatch, 2.0)
    assert found["speedup"] > 0
    assert notes == []
    assert all(graph.replays > 2 for graph in graphs)
    for factor, apart in ((2.1, "5.0e-02"), (0.0, "inf")):
        with pytest.raises(ValueError, match=f"the replayed output of the original differs by {apart}"):
            replayed(monkeypatch, factor)


def test_a_network_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> models_row.Captured:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(models_row, "_captured", refused)
    notes: list[str] = []
    setting = models.Setting(torch.device("cpu"), True, 2)
    inputs = Inputs.of(torch.zeros(1))
    assert models_row.time_replayed({"original": nn.Identity()}, inputs, setting, notes) is None
    assert notes == ["no CUDA graph: operation not permitted when stream is capturing"]


@pytest.mark.gpu
@pytest.mark.parametrize("runtime", models.RUNTIMES)
def test_a_forward_pass_is_replayed_on_a_gpu(runtime: str) -> None:
    setting = models.Setting(torch.device("cuda"), True, 2)
    torch.compiler.reset()
    row = models.measure(models.Case("vae", "fp16", "channels_last", runtime), setting)
    assert row["cuda_graph"]["speedup"] > 0
    assert not any("CUDA graph" in note for note in row["notes"])
    torch.compiler.reset()


def test_chart(measured: dict[str, Any]) -> None:
    svg = models_report.chart(measured)
    assert svg == models_report.chart(measured)
    assert "prefers-color-scheme: dark" in svg
    assert ">DCGAN generator, 64 pixels<" in svg
    assert ">training step<" in svg
    assert re.search(r">\d+( to \d+)?%<", svg)


def test_charts_are_put_into_the_readmes(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "benchmarks/README.md"):
        assert models_report._CHART.search((models_report.ROOT / name).read_text())
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((models_report.ROOT / name).read_bytes())
    monkeypatch.setattr(models_report, "ROOT", tmp_path)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir()
    (results / "h200-models.json").write_text(json.dumps(measured))
    for _ in range(2):
        assert models.main(["--json", str(results / "h200-models.json"), "--render"]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert readme.count("![Speedup of whole networks](benchmarks/results/h200-models.svg)") == 1
    assert (results / "h200-models.svg").read_text() == models_report.chart(measured)
    below = (tmp_path / "benchmarks" / "README.md").read_text()
    assert below.count("![Speedup of whole networks](results/h200-models.svg)") == 1
    assert "Eager, forward: " in below


def test_show_prints_the_committed_rows(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.json").write_text(json.dumps(measured))
    assert models.main(["--json", str(tmp_path / "kept.json"), "--show"]) == 0
    assert capsys.readouterr().out == models_report.table(measured) + "\n"
