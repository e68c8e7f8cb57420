"""Modules in a row, and a row of them beside which the input passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parallel._checks import check_instance
from parallel.nn._module import Module


class Sequential(Module):
    """Run modules one after the other; their paths are "0", "1" and so on.

    ``layers`` are the modules, the first to be run first. Raises TypeError for a layer that is no
    ``Module``.
    """

    def __init__(self, *layers: Module) -> None:
        super().__init__()
        for i, layer in enumerate(layers):
            check_instance(layer, Module, f"layers[{i}]")
        self.layers = layers

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (position, module)."""
        return ((str(i), layer) for i, layer in enumerate(self.layers))

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> Module:
        return self.layers[index]

    def forward(self, x: Any) -> Any:
        """Return the last module's output."""
        for layer in self.layers:
            x = layer(x)
        return x

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the first module's input."""
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad


class Residual(Sequential):
    """Add what modules in a row make of the input to the input itself: ``x + layers(x)``.

    He et al., "Deep Residual Learning", arXiv:1512.03385, section 3.2. ``layers`` are the modules,
    the first to be run first; the last one's output has the shape of the input. Raises TypeError
    for a layer that is no ``Module``.
    """

    def forward(self, x: Any) -> Any:
        """Return the input plus the last module's output."""
        return x + super().forward(x)

    def backward(self, grad: Any) -> Any:
        """Return the gradient of the input: by both ways."""
        return grad + super().backward(grad)
