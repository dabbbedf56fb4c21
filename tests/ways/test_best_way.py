"""What a way is called, and the search: what it tries, what it leaves out, and what is left of it when it is ended."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_cases import generator, images
from torch import nn

from tconv_swap import interruption
from tconv_swap.inputs import Inputs
from tconv_swap.measurement.timing import Timing
from tconv_swap.ways import profile
from tconv_swap.ways.report import StageWays
from tconv_swap.ways.search import EQUAL_WITHIN, NO_TIME, Search
from tconv_swap.ways.way import LAYERS, RUNTIMES, TODAY, Way, all_ways, parse_way

CUDA = torch.device("cuda")


class TestNames:
    @pytest.mark.parametrize("layers", [layers.name for layers in LAYERS])
    def test_every_name_is_parsed_back(self, layers: str) -> None:
        ways = all_ways(generator(), Inputs.of(images()), CUDA)
        assert len(ways) == len({way.name for way in ways})
        # The compiler fuses norms itself.
        assert len(ways) == len(LAYERS) * 2 * len(RUNTIMES) - 2 * 2
        assert [parse_way(way.name) for way in ways] == ways

    @pytest.mark.parametrize(
        ("text", "way"),
        [
            ("graph", Way("ours", runtime="graph")),
            ("graph+compile+channels_last", Way("ours", "channels_last", "compile+graph")),
            ("pytorch+eager", TODAY),
        ],
    )
    def test_in_any_order_and_ours_by_default(self, text: str, way: Way) -> None:
        assert parse_way(text) == way

    @pytest.mark.parametrize("text", ["", "fast", "ours+pytorch", "graph+graph", "eager+graph", "ours graph"])
    def test_nonsense_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError):
            parse_way(text)


class TestAllWays:
    def test_todays_way_comes_first_then_those_built_fastest(self) -> None:
        ways = all_ways(generator(), Inputs.of(images()), CUDA)
        assert ways[0] == TODAY
        order = [RUNTIMES.index(way.runtime) for way in ways]
        assert order == sorted(order)

    def test_the_cpu_has_no_graphs(self) -> None:
        ways = all_ways(generator(), Inputs.of(images()), torch.device("cpu"))
        assert {way.runtime for way in ways} == {"eager", "compile"}

    def test_norms_are_fused_on_cuda_where_there_are_any(self) -> None:
        inputs = Inputs.of(images())
        runtimes = {way.runtime for way in all_ways(generator(), inputs, CUDA) if way.layers == "fused"}
        assert runtimes == {"eager", "graph"}
        plain = nn.Sequential(nn.ConvTranspose2d(4, 6, 4, 2, 1))
        for network, device in ((plain, CUDA), (generator(), torch.device("cpu"))):
            assert {way.layers for way in all_ways(network, inputs, device)} == {"pytorch", "ours"}

    def test_a_network_in_channels_last_has_one_layout(self) -> None:
        network = generator().to(memory_format=torch.channels_last)
        laid_out = Inputs.of(images()).to(memory_format=torch.channels_last)
        assert {way.layout for way in all_ways(network, laid_out, CUDA)} == {"as it is"}
        flat = Inputs.of(torch.zeros(2, 3))
        assert {way.layout for way in all_ways(nn.Linear(3, 3), flat, CUDA)} == {"as it is"}


class Bench:
    """Ways that take so many milliseconds, on a clock of their own; an exception is raised by building."""

    def __init__(self, times: dict[str, float | BaseException], build_s: float = 1.0) -> None:
        self.times = times
        self.build_s = build_s
        self.now = 0.0
        self.built: list[str] = []
        self.alive: set[str] = set()

    def build(self, way: Way) -> str:
        self.now += self.build_s
        self.built.append(way.name)
        time = self.times.get(way.name, 50.0)
        if isinstance(time, BaseException):
            raise time
        return way.name

    def measure(self, today: str, other: str) -> tuple[Timing, Timing]:
        found = [self.times.get(name, 50.0) for name in (today, other)]
        assert not any(isinstance(one, BaseException) for one in found)
        first, second = (Timing.of([float(one)] * 9) for one in found)  # type: ignore[arg-type]
        return first, second

    def search(self, *ways: Way, seconds: float | None = None) -> Search[str]:
        chosen = ways or tuple(all_ways(generator(), Inputs.of(images()), CUDA))
        return Search(chosen, self.build, self.measure, lambda: self.now, seconds)


def run(bench: Bench, *ways: Way, seconds: float | None = None, progress: Any = None) -> Search[str]:
    search = bench.search(*ways, seconds=seconds)
    search.run(progress)
    return search


def why_not(search: Search[str], name: str) -> str:
    row = search.row(parse_way(name))
    assert row is not None
    return row.why_not


class TestSearch:
    def test_the_fastest_of_all_and_of_each_kind_of_layers(self) -> None:
        search = run(Bench({"pytorch": 50, "pytorch+graph": 30, "ours+channels_last": 20, "ours+graph": 25}))
        best, theirs = search.best(), search.best("pytorch")
        assert best is not None
        assert theirs is not None
        assert (best.way.name, best.speedup) == ("ours+channels_last", 2.5)
        assert theirs.way.name == "pytorch+graph"

    def test_a_reference_that_varies_decides_nothing(self) -> None:
        bench = Bench({"ours+graph": 20, "ours+channels_last+graph": 21})
        measure = bench.measure

        def slower_today(today: str, other: str) -> tuple[Timing, Timing]:
            reference, timing = measure(today, other)
            return (Timing.of([90.0] * 9), timing) if "channels_last" in other else (reference, timing)

        bench.measure = slower_today  # type: ignore[method-assign]
        best = run(bench).best()
        assert best is not None
        assert best.way.name == "ours+graph"

    def test_our_best_way_may_have_fused_layers(self) -> None:
        search = run(Bench({"pytorch+graph": 10, "ours": 30, "fused+graph": 20}))
        found = StageWays("step", search.rows)
        assert found.our_best is not None
        assert found.our_best.way.name == "fused+graph"
        assert StageWays("step", [row for row in search.rows if row.way.layers == "pytorch"]).our_best is None

    def test_todays_way_is_pytorchs_best_if_it_is_faster_side_by_side(self) -> None:
        search = run(Bench({"pytorch": 50, "pytorch+graph": 30, "pytorch+compile+graph": 40, "ours": 20}))
        found = StageWays("step", search.rows)
        assert found.pytorch_best == parse_way("pytorch+graph")
        found.finals = {"pytorch": Timing.of([31.0] * 9), "pytorch+graph": Timing.of([30.0] * 9)}
        assert found.pytorch_best == parse_way("pytorch+graph")
        found.finals["pytorch+graph"] = Timing.of([32.0] * 9)
        assert found.pytorch_best == TODAY
        assert found.to_dict()["pytorch_best"] == TODAY.name
        assert StageWays("step").pytorch_best is None

    def test_the_way_that_requires_less_wins_at_equal_speed(self) -> None:
        almost = 20 * (1 + EQUAL_WITHIN / 2)
        best = run(Bench({"ours": almost, "ours+compile+graph": 20})).best()
        assert best is not None
        assert best.way.name == "ours"
        best = run(Bench({"ours": 20 * (1 + 2 * EQUAL_WITHIN), "ours+compile+graph": 20})).best()
        assert best is not None
        assert best.way.name == "ours+compile+graph"

    def test_only_todays_and_the_best_of_each_kind_stay_built(self) -> None:
        search = run(Bench({"pytorch": 50, "pytorch+graph": 30, "ours+channels_last": 20}))
        assert {way.name for way in search.built} == {
            "pytorch",
            "pytorch+graph",
            "ours+channels_last",
            "fused",
        }

    def test_compile_is_not_tried_beside_compile_and_graph(self) -> None:
        bench = Bench({})
        search = run(bench)
        assert "ours+compile+graph" in bench.built
        assert "ours+compile" not in bench.built
        assert "launches the same kernels" in why_not(search, "ours+compile")

    def test_a_much_slower_layout_is_not_compiled(self) -> None:
        bench = Bench({"ours": 50, "ours+channels_last": 20, "ours+graph": 45})
        search = run(bench)
        assert "2.2 times slower" in why_not(search, "ours+compile+graph")
        assert "ours+channels_last+compile+graph" in bench.built
        assert "pytorch+compile+graph" in bench.built  # PyTorch's layers are as fast in both

    def test_a_layout_is_compared_where_nothing_is_compiled(self) -> None:
        bench = Bench({"ours": 40, "ours+channels_last": 40, "ours+compile+graph": 20})
        run(bench)
        assert "ours+channels_last+compile+graph" in bench.built

    @pytest.mark.parametrize(("hopeless", "is_tried"), [(1.5, True), (1.2, False)])
    def test_the_factor_for_slow_layouts_can_be_set(self, hopeless: float, is_tried: bool) -> None:
        bench = Bench(
            {"ours": 50, "ours+channels_last": 40, "ours+graph": 65, "ours+channels_last+graph": 50}
        )
        search = bench.search()
        search.hopeless = hopeless
        search.run()
        assert ("ours+compile+graph" in bench.built) == is_tried

    def test_an_impossible_way_is_noted_once_and_the_rest_is_tried(self) -> None:
        bench = Bench({"ours+graph": RuntimeError("it waits\nfor the GPU"), "ours": 20})
        search = run(bench)
        assert why_not(search, "ours+graph") == "RuntimeError: it waits"
        assert why_not(search, "ours+channels_last+graph") == "not tried: ours+graph failed"
        assert "ours+channels_last+graph" not in bench.built
        assert search.row(Way("ours", runtime="compile+graph")) is not None
        assert search.best() is not None

    def test_out_of_memory_is_reported(self) -> None:
        search = run(Bench({"ours+graph": torch.OutOfMemoryError("CUDA out of memory. Tried")}))
        assert why_not(search, "ours+graph") == "not enough memory"

    def test_a_failed_gpu_ends_the_search(self) -> None:
        with pytest.raises(torch.AcceleratorError):
            run(Bench({"ours+graph": torch.AcceleratorError("an illegal memory access")}))

    def test_a_network_that_does_not_run_raises(self) -> None:
        with pytest.raises(RuntimeError, match="no such shape"):
            run(Bench({"pytorch": RuntimeError("no such shape")}))

    def test_no_way_starts_that_would_exceed_the_time(self) -> None:
        bench = Bench({}, build_s=10.0)
        search = run(bench, seconds=45.0)
        assert bench.now <= 45.0
        assert len(bench.built) == 4
        assert why_not(search, "ours+compile+graph") == NO_TIME
        assert len(search.rows) == len(search.ways)

    def test_todays_way_is_timed_even_without_time(self) -> None:
        bench = Bench({})
        assert run(bench, seconds=0.0).best() is not None
        assert bench.built == ["pytorch"]

    def test_ctrl_c_keeps_what_was_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = Bench({"ours": 20, "pytorch+graph": KeyboardInterrupt()})
        with pytest.raises(KeyboardInterrupt):
            interruption.on_signal(signal.SIGINT, None)
        search = run(bench)
        assert search.interrupted
        best = search.best()
        assert best is not None
        assert best.way.name == "ours"
        assert why_not(search, "ours+graph") == "interrupted"
        assert len(search.rows) == len(search.ways)
        assert "interrupted: 6 of 20 ways" in search.notes[0]
        interruption.raise_again()  # is not raised again: it was handled

    def test_ctrl_c_before_any_measurement_is_raised(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            run(Bench({"pytorch": KeyboardInterrupt()}))

    def test_requirements_are_shown_before_a_way_is_tried(self) -> None:
        said: list[str] = []
        run(Bench({}), progress=lambda text, *_: said.append(text))
        graph = next(text for text in said if text.startswith("trying ours+graph"))
        assert "static shapes" in graph
        assert "random numbers" in graph
        assert "needs" not in said[0]

    def test_a_wrong_way_is_not_the_best(self) -> None:
        search = run(Bench({"ours": 20, "ours+graph": 30}))
        search.change(Way("ours"), failure="train: output")
        best = search.best()
        assert best is not None
        assert best.way.name == "ours+graph"


class TestProfile:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("void cudnn::bn_fw_tr_1C11_singleread", "normalisation"),
            ("aten::native_batch_norm", "normalisation"),
            ("sm90_xmma_fprop_implicit_gemm_tf32f32", "convolutions and matrix products"),
            ("forward_implicit_gemm_wgmma", "convolutions and matrix products"),
            ("aten::mkldnn_convolution", "convolutions and matrix products"),
            ("void cudnn::ops::nchwToNhwcKernel", "copies between layouts and dtypes"),
            ("Memcpy DtoD (Device -> Device)", "copies between layouts and dtypes"),
            ("void at::native::vectorized_elementwise_kernel", "passes over memory"),
            ("triton_poi_fused_relu_3", "passes over memory"),
            ("something_else", profile.OTHER),
        ],
    )
    def test_kinds(self, name: str, kind: str) -> None:
        assert profile.kind_of(name) == kind

    def test_a_gpu_that_waits_is_bound_by_the_cpu(self) -> None:
        line = profile.describe([("gemm", 20.0), ("batch_norm", 10.0)], 100.0)
        assert line == (
            "bound by the CPU, which launches: the GPU works 30% of the time; of that: "
            "convolutions and matrix products 67%, normalisation 33%"
        )

    def test_a_busy_gpu_is_bound_by_its_longest_work(self) -> None:
        line = profile.describe([("gemm", 20.0), ("batch_norm", 75.0), ("copy", 1.0)], 100.0)
        assert line.startswith(
            "bound by normalisation; the GPU works 96% of the time; of that: normalisation 78%"
        )
        assert "copies" not in line

    def test_an_empty_profile_gives_no_line(self) -> None:
        assert profile.describe([]) == ""

    def test_a_network_on_the_cpu(self) -> None:
        layer = nn.Conv2d(8, 64, 3)
        image = images(4, 8, 32, 32)
        work: Callable[[], object] = lambda: layer(image)  # noqa: E731
        assert profile.bound_of(work, torch.device("cpu")).startswith(
            "bound by convolutions and matrix products"
        )
