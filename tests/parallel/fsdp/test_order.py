"""When parameters are gathered and gradients reduced."""

import numpy as np

from meshlib import extend
from parallel import nn
from parallel.fsdp import fully_shard
from tests.support.parallel.fsdp_training import (
    on_mesh,
)


def stack(widths=(3, 5, 7)):
    """Layers that are told apart by the sizes of what is gathered for them: 9, 15, 21."""
    rng = np.random.default_rng(0)
    return nn.Sequential(*(Wide(width, rng) for width in widths))


class Wide(nn.Module):
    def __init__(self, width, rng):
        super().__init__()
        self.weight = nn.Parameter(rng.normal(size=(3, width)))
        self.log = []

    def forward(self, x):
        self.save_for_backward(x)
        self.log.append(("forward", self.weight.data.size))
        return x

    def backward(self, grad):
        self.saved()
        self.log.append(("backward", self.weight.data.size))
        self.weight.accumulate_grad(np.ones_like(self.weight.data))
        return grad


def order_of(prepare):
    """Return what happens in a training step, in its order, with ``prepare(model)`` done."""

    def program(mesh):
        model = stack()
        for layer in model:
            fully_shard(layer, mesh)
        fully_shard(model, mesh)
        prepare(model)
        log = []
        kinds = {"ALL_GATHER": "gather", "REDUCE_SCATTER": "reduce"}

        def observe(group, header, device, run):
            log.append((kinds[header.kind.name], header.elements))
            return run

        model.backward(model(np.ones((1, 3))))
        for layer in model:
            layer.log = log
        with extend.observe(mesh.process_group, observe):
            model.backward(model(np.ones((1, 3))))
        return log

    first, second = on_mesh(program, 2)
    assert first == second
    return first


def test_the_next_ones_parameters_are_gathered_before_this_one_computes():
    assert order_of(lambda model: None) == [
        ("gather", 9),
        ("gather", 15),
        ("forward", 9),
        ("gather", 21),
        ("forward", 15),
        ("forward", 21),
        ("gather", 21),
        ("gather", 15),
        ("backward", 21),
        ("reduce", 21),
        ("gather", 9),
        ("backward", 15),
        ("reduce", 15),
        ("backward", 9),
        ("reduce", 9),
    ]


def test_modules_say_what_is_gathered_while_they_compute():
    def prepare(model):
        model.set_modules_to_forward_prefetch([model[0], model[1], model[2]])
        model[0].set_modules_to_forward_prefetch([])
        model[1].set_modules_to_forward_prefetch([])
        for layer in model:
            layer.set_modules_to_backward_prefetch([])
        model.set_modules_to_backward_prefetch([model[2], model[1]])

    assert [entry for entry in order_of(prepare) if entry[0] != "reduce"] == [
        ("gather", 9),
        ("gather", 15),
        ("gather", 21),
        ("forward", 9),
        ("forward", 15),
        ("forward", 21),
        ("gather", 21),
        ("gather", 15),
        ("backward", 21),
        ("backward", 15),
        ("gather", 9),
        ("backward", 9),
    ]
