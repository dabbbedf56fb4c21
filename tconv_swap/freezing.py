"""``freeze`` and ``unfreeze`` keep and release the packed weights of a network that is used for inference only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from tconv_swap.layer_state import LayerState


def freeze(model: nn.Module) -> nn.Module:
    """Keeps the packed weights of the swapped layers of a network while it is used for inference only.

    On CUDA some kernels need the weight in another order. By default they pack it on every call, so that no change of
    it is missed. A frozen layer packs it once for each kind of input and uses the result where no gradient is needed,
    no autocast is on and no CUDA graph is being captured; elsewhere it computes as before.

    A layer is no longer frozen after ``unfreeze``, ``load_state_dict``, ``.train()``, ``.to()`` and its like, and after
    an in-place change of its weight or another storage in its place. **A change through ``weight.data`` or by another
    library is not seen**: call ``unfreeze``, and ``freeze`` again. Copies and pickles of a layer are not frozen.
    Parametrized weights are computed again on every call and are never frozen, nor are 1-D layers.

    Args:
        model: a network in eval mode; may itself be the layer.

    Returns:
        ``model``.

    Raises:
        ValueError: a swapped layer is in training mode.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, LayerState)]
    if any(layer.training for layer in layers):
        raise ValueError("freeze is for inference, but a layer is in training mode: call model.eval() first")
    for layer in layers:
        layer.tconv_keep_packed()
    return model


def unfreeze(model: nn.Module) -> nn.Module:
    """Undoes ``freeze``: every layer reads its weight on every call again, and the packed weights are released.

    Args:
        model: a network, frozen or not; may itself be the layer.

    Returns:
        ``model``.
    """
    for layer in model.modules():
        if isinstance(layer, LayerState):
            layer.tconv_release_packed()
    return model


class FrozenState:
    """The frozen layers among some modules, which can be frozen again after they have run in training mode."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._layers = [
            module for module in modules if isinstance(module, LayerState) and module.tconv_is_frozen()
        ]

    def put_back(self) -> None:
        """Freezes the layers again. A packed weight that still exists is kept; the next call packs the others
        again."""
        for layer in self._layers:
            if not layer.tconv_is_frozen():
                layer.tconv_keep_packed()
