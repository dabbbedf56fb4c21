"""`optimize` tries the ways to run a network and returns the fastest one that computes the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from tconv_swap.computed import deep_copy
from tconv_swap.inputs import Inputs, model_device
from tconv_swap.measurement.environment import environment
from tconv_swap.measurement.modes import cudnn_benchmark
from tconv_swap.measurement.stages import Loss, network_variant, sum_of_squares
from tconv_swap.measurement.timing import Timing, time_interleaved
from tconv_swap.memory import is_out_of_memory
from tconv_swap.preparation import prepare
from tconv_swap.preserving import preserved
from tconv_swap.verification import VerifyReport
from tconv_swap.ways.check import verify_way
from tconv_swap.ways.profile import bound_of
from tconv_swap.ways.report import StageWays, WaysReport, WayStage
from tconv_swap.ways.run import Running, build
from tconv_swap.ways.search import NO_MEMORY, Progress, Search, WayRow
from tconv_swap.ways.way import (
    LAYERS,
    PYTORCH,
    TODAY,
    Way,
    all_ways,
    in_layout,
    inputs_in_layout,
    parse_way,
    why_impossible,
    with_layers,
)

SECONDS = 300.0
#: Seconds of samples for each way and today's way, and for the last comparison.
TIMING_S, FINAL_S = 0.3, 1.0


class Optimized(NamedTuple):
    """The result of `optimize`.

    Attributes:
        model: a copy of the network with the layers and in the layout of the way; an optimizer trains its parameters.
        run: calls the model in this way.
        report: every way with its time, and why this one was chosen.
    """

    model: nn.Module
    run: Running
    report: WaysReport


def optimize(
    model: nn.Module,
    inputs: object,
    *,
    training: bool = False,
    ways: str | Sequence[str | Way] | None = None,
    seconds: float | None = SECONDS,
    loss: Loss | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Optimized:
    """Times the ways to run a network, verifies the fastest, and returns it ready to be called.

    A way consists of layers (PyTorch's, ours, or ours with norms and activations fused), a layout (as it is,
    channels_last) and a runtime (eager, CUDA graph, torch.compile, compiled with CUDA graphs). Each way is timed beside
    today's: PyTorch's form of the network's layers, eager, in its own layout. The fastest is verified against today's,
    as `tconv_swap.verify` verifies a swap; if it fails, it is not chosen, and the next is verified. All runs are under
    the caller's autocast state, with `torch.backends.cudnn.benchmark` on.

    Ctrl-C ends the search; the choice is then made from what was measured.

    Args:
        model: the network; it does not change, nor do its buffers, gradients, modes and random states.
        inputs: whatever `Inputs.of` accepts, on the network's device, with the shapes of later calls. No gradients of
            them are computed.
        training: times a training step (forward, loss, backward, an SGD step) in train mode; False: the forward pass in
            eval mode without gradients.
        ways: the names of the ways to try (`"ours+channels_last+graph"`; without a word for layers, ours); None: all.
            Today's way is always timed.
        seconds: no way is started that would not finish within this time; None: no limit.
        loss: maps the network's output to a scalar, for a training step; `sum_of_squares` if None.
        seed: the seed of the verification's random numbers.
        progress: called with (the next step, ways done, ways in all).

    Raises:
        TypeError: `Inputs.of` does not accept `inputs`.
        ValueError: there is no such way, or this device supports none of them.
        Exception: whatever the network raises in today's way.
    """
    searched = WaySearch(model, inputs, training=training, loss=loss, seed=seed)
    report = WaysReport(environment=environment(searched.device), method=searched.method(seconds))
    stage = searched.run(searched.chosen_from(ways), seconds, progress)
    report.stages.append(stage)
    running = searched.search.get(stage.best)
    searched.search.built.clear()
    return Optimized(running.network, running, report)


def in_way(model: nn.Module, way: str | Way, inputs: object, *, training: bool = False) -> Running:
    """Makes a network run in a way, for example in the one that `optimize` found before, without searching again.

    Args:
        model: the network, which is changed: its layers are swapped if the way has our layers, its parameters get the
            layout of the way, and it is put into train or eval mode. Parameters stay the same objects; buffers,
            gradients and random states do not change.
        way: its name, such as `"channels_last+compile+graph"`.
        inputs: as in `optimize`; if some require gradients, those of later calls have to require them too.
        training: the network will be differentiated; False: eval mode without gradients.

    Returns:
        A module that is called like the network. Inputs of other shapes run eagerly, with one `WayWarning`.

    Raises:
        TypeError: `Inputs.of` does not accept `inputs`.
        ValueError: there is no such way, or this device does not support it.
        Exception: whatever the network, the compiler or the capture raises.
    """
    found = parse_way(way) if isinstance(way, str) else way
    if reason := why_impossible(found, model_device(model)):
        raise ValueError(f"{found}: {reason}")
    return build(with_layers(model, found.layers), found, Inputs.of(inputs), training=training)


class WaySearch:
    """The search for one stage of a network; `search` holds what is still built."""

    def __init__(
        self,
        model: nn.Module,
        inputs: object,
        *,
        training: bool,
        loss: Loss | None = None,
        seed: int = 0,
        timing_s: float = TIMING_S,
        final_s: float = FINAL_S,
    ) -> None:
        self.model = model
        self.inputs = Inputs.of(inputs).map(Tensor.detach)
        self.training = training
        self.loss = loss or sum_of_squares
        self.seed = seed
        self.timing_s = timing_s
        self.final_s = final_s
        self.device = model_device(model)
        self.stage: WayStage = "step" if training else "forward"
        self.search: Search[Running] = Search((), self._build, self._measure, time.perf_counter)

    def method(self, seconds: float | None) -> dict[str, object]:
        return {
            "order": "each way interleaved with today's",
            "statistic": "median, quartiles",
            "clock": "cuda events" if self.device.type == "cuda" else "wall clock",
            "launches": "included",
            "cudnn_benchmark": True,
            "budget_s": self.timing_s,
            "seconds": seconds,
        }

    def chosen_from(self, ways: str | Sequence[str | Way] | None) -> list[Way]:
        """Returns the named ways, today's first; all that this device supports if `ways` is None.

        Raises:
            ValueError: there is no such way, or this device supports none of them.
        """
        if ways is None:
            return all_ways(self.model, self.inputs, self.device)
        named = [ways] if isinstance(ways, str) else ways
        found = [parse_way(way) if isinstance(way, str) else way for way in named]
        for way in found:
            if reason := why_impossible(way, self.device):
                raise ValueError(f"{way}: {reason}")
        return list(dict.fromkeys([TODAY, *found]))

    def run(
        self,
        ways: Sequence[Way],
        seconds: float | None,
        progress: Progress | None = None,
        wanted: Way | None = None,
    ) -> StageWays:
        """Times the ways, verifies the fastest, times it again beside today's and the best with each kind of layers,
        and profiles it.

        `wanted` is chosen however slow it is, if it can be built and computes the same.
        """
        found = self.fastest(ways, seconds, progress, wanted)
        if progress is not None:
            progress("timing the best ways side by side")
        self.compare(found)
        times = {name: timing.median_ms for name, timing in found.finals.items()}
        if wanted is None and times and times[TODAY.name] <= times[found.best.name]:
            # Timed again in one run, it is not faster than today's.
            found.best = TODAY
        if progress is not None:
            progress("profiling")
        found.bound = self.bound(found.best)
        return found

    def fastest(
        self,
        ways: Sequence[Way],
        seconds: float | None,
        progress: Progress | None = None,
        wanted: Way | None = None,
        layers: Sequence[str] = (),
    ) -> StageWays:
        """Times the ways and verifies the fastest: of all, of those with one of these layers, or only `wanted`."""
        search = self.search
        search.ways, search.seconds = ways, seconds
        with preserved(self.model), cudnn_benchmark():
            search.run(progress)
            best, verification = self._fastest_verified(progress, wanted, layers)
        return StageWays(self.stage, search.rows, best, verification=verification, notes=search.notes)

    def compare(self, found: StageWays) -> None:
        """Times the chosen way, the best with each kind of layers and today's, interleaved in one run."""
        with preserved(self.model), cudnn_benchmark():
            found.finals = self._finals(found)

    def bound(self, way: Way) -> str:
        """Returns one line that says what bounds a way, from a profile; `""` if the profile shows nothing."""
        with preserved(self.model), cudnn_benchmark():
            running = self.search.get(way)
            variant = network_variant(running.train(self.training), self.inputs, self.stage, self.loss)
            with preserved(running):
                return bound_of(lambda: variant.run(variant.prepare()), self.device)

    def _build(self, way: Way) -> Running:
        network = deep_copy(self.model)
        network.zero_grad(set_to_none=True)
        network = with_layers(network, way.layers)
        if self.device.type == "cuda" and way.layers != PYTORCH.name and way.runtime == "eager":
            # On all cores, before the first call compiles them one by one. The other runtimes run the same kernels.
            laid_out = in_layout(network, way.layout).train(self.training)
            prepare(laid_out, inputs_in_layout(self.inputs, way.layout), training=self.training)
        return build(network, way, self.inputs, training=self.training, loss=self.loss)

    def _measure(self, today: Running, running: Running) -> tuple[Timing, Timing]:
        both = {"today": today, "way": running} if running is not today else {"today": today}
        timed = self._time(both, self.timing_s)
        return timed["today"], timed.get("way", timed["today"])

    def _time(self, running: dict[str, Running], budget_s: float) -> dict[str, Timing]:
        for one in running.values():
            one.train(self.training)
        with preserved(*running.values()):
            variants = {
                name: network_variant(one, self.inputs, self.stage, self.loss)
                for name, one in running.items()
            }
            return time_interleaved(variants, device=self.device, launches="included", budget_s=budget_s)

    def _fastest_verified(
        self, progress: Progress | None, wanted: Way | None, layers: Sequence[str]
    ) -> tuple[Way, VerifyReport | None]:
        """Verifies the ways from the fastest on until one passes, of all or of those with one of these layers, or only
        the wanted one. Today's way needs no verification."""

        def candidate() -> WayRow | None:
            if wanted is None:
                return self.search.best(*layers)
            row = self.search.row(wanted)
            return None if row is None or row.timing is None or row.failure else row

        while (best := candidate()) is not None and best.way != TODAY:
            if progress is not None:
                progress(f"verifying {best.way}")
            report = self._verify(best)
            if report.passed:
                self.search.change(best.way, verified=True)
                return best.way, report
            reason = report.first_divergence or report.failures[0]
            self.search.change(best.way, verified=False, failure=reason)
            refusal = f"{best.way} is not chosen: {reason}"
            self.search.notes.append(refusal)
            if progress is not None:
                progress(refusal)
        return TODAY, None

    def _verify(self, row: WayRow) -> VerifyReport:
        try:
            running = self.search.get(row.way)
        except Exception as error:  # it was built once, but there may be less memory now
            return VerifyReport(failures=[f"it cannot be built again: {error}".partition("\n")[0]])
        report = self._verified_in_memory(running)
        if report is None:
            self.search.drop_others({TODAY, row.way})
            report = self._verified_in_memory(running)
        return VerifyReport(failures=[f"{NO_MEMORY} to verify it"]) if report is None else report

    def _verified_in_memory(self, running: Running) -> VerifyReport | None:
        """Returns the verification's report; None if there is too little memory for it: it makes copies in float64, and
        the ways that are still built hold their graphs' memory."""
        try:
            return verify_way(self._original(), running, self.inputs, seed=self.seed)
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise

    def _original(self) -> nn.Module:
        return self.search.get(TODAY).network

    def _finals(self, found: StageWays) -> dict[str, Timing]:
        best = [row.way for layers in LAYERS if (row := self.search.best(layers.name)) is not None]
        running: dict[str, Running] = {}
        try:
            running |= {way.name: self.search.get(way) for way in dict.fromkeys([TODAY, *best, found.best])}
            return self._time(running, self.final_s) if len(running) > 1 else {}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.search.notes.append(f"{NO_MEMORY} to time the best ways side by side")
        running.clear()
        self.search.drop_others({TODAY, found.best})
        return {}
