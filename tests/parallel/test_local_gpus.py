"""``DataParallel`` over several GPUs of one process, which are host memory here.

Copies between devices are done late, in a random order unless events order them; each device has
its own stream; the stand-in for CuPy refuses to compute on one device with arrays of another one.
"""

import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / name) for name in ("transport/gpu", "meshlib")]
import fake_cupy
import training
from host_driver import HostDriver, HostMachine

from parallel import DataParallel, Parameter, nn
from parallel.data_parallel._devices import Devices
from parallel.nn import Buffer, Module
from transport._errors import DistBackendError

DEVICES = 4


@pytest.fixture
def xp(monkeypatch):
    """The stand-in for CuPy; the calling thread uses four devices. No thread is left behind."""
    module = fake_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr("transport._cuda.driver.cuda_driver", fake_cupy.driver)
    with fake_cupy.as_rank(HostMachine(DEVICES, seed=1), 0):
        yield module
        assert not [t for t in threading.enumerate() if t.name.startswith("replica")]


def on(device):
    return fake_cupy.driver().on(device)


def host(value):
    return value.get()


def gradients(model):
    return {path: host(p.grad) for path, p in model.named_parameters()}


def assert_equal(got, expected):
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(got[path], value, rtol=0, atol=1e-12, err_msg=path)


@pytest.mark.parametrize(
    ("rows", "device_ids"),
    [
        (12, [0]),
        (12, [0, 1]),
        (12, [0, 1, 2]),
        (5, [0, 1, 2]),
        (4, [0, 2, 1]),
        (2, [0, 3, 1, 2]),
        (0, [0, 1]),
    ],
)
def test_outputs_and_gradients_are_those_of_one_device(xp, rows, device_ids):
    alone = training.make_model()
    model = DataParallel(training.make_model().map_arrays(xp.asarray), device_ids)
    rng = np.random.default_rng(0)
    for _ in range(2):  # gradients of two passes add up
        x, grad = rng.normal(size=(rows, 6)), rng.normal(size=(rows, 4))
        y, expected = model(xp.asarray(x)), alone(x)
        np.testing.assert_allclose(host(y), expected, rtol=0, atol=1e-12)
        back = model.backward(xp.asarray(grad))
        np.testing.assert_allclose(host(back), alone.backward(grad), rtol=0, atol=1e-12)
        assert y.device.id == back.device.id == 0
    assert {p.grad.device.id for p in model.parameters()} == {0}
    assert_equal(
        {path.removeprefix("module."): grad for path, grad in gradients(model).items()},
        {path: p.grad for path, p in alone.named_parameters()},
    )
    assert not any(p.uses for p in model.parameters())


@pytest.mark.parametrize("outer", [0, 2])
def test_training_ends_where_it_ends_on_one_device(xp, outer):
    """Also with inputs and outputs of other devices than the parameters'."""
    got = training.train_on_devices(xp, [1, 0, 2], outer, on, steps=6)
    assert_equal(got, training.parameters(training.train(training.make_model(), steps=6)))


def test_the_same_bits_in_each_run(xp):
    def run():
        model = DataParallel(training.make_model().map_arrays(xp.asarray), [0, 1, 2])
        model.backward(model(xp.asarray(training.batch(0)[0])))
        return gradients(model)

    first, second = run(), run()
    assert all((first[path] == second[path]).all() for path in first)


def test_outstanding_passes_end_in_reverse_and_a_hook_fires_once(xp):
    alone, model = training.make_model(), training.make_model()
    model = DataParallel(model.map_arrays(xp.asarray), [0, 1, 2])
    fired = []
    for path, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, path=path: fired.append((path, p.grad))
        )
    batches = [
        np.random.default_rng(seed).normal(size=(rows, 6)) for seed, rows in [(0, 5), (1, 7)]
    ]
    outputs = [(model(xp.asarray(x)), alone(x)) for x in batches]
    for y, expected in reversed(outputs):
        assert not fired
        model.backward(y)
        alone.backward(expected)
    assert sorted(path for path, _ in fired) == sorted(p for p, _ in model.named_parameters())
    assert_equal(
        {path.removeprefix("module."): host(grad) for path, grad in fired},
        {path: p.grad for path, p in alone.named_parameters()},
    )
    with pytest.raises(RuntimeError, match="without a matching forward"):
        model.backward(y)


def test_what_is_discarded_leaves_no_use(xp):
    model = DataParallel(nn.Linear(2, 2, rng=np.random.default_rng(0)).map_arrays(xp.asarray))
    outer = nn.Sequential(model)
    for _ in range(2):
        outer(np.ones((8, 2), np.float32))
    assert model.module.weight.uses == 2
    outer.discard_saved()
    assert not any(p.uses for p in outer.parameters())
    outer.eval()(np.ones((8, 2), np.float32))
    assert not model.outstanding
    assert not any(p.uses for p in outer.parameters())


def test_copies_are_ordered_on_both_devices(xp, monkeypatch):
    driver, done = fake_cupy.driver(), []
    machine, devices = driver.machine, Devices(driver)
    source, target = (driver.current_stream(device) for device in (0, 1))
    x = xp.asarray(np.arange(6.0))
    monkeypatch.setattr(fake_cupy, "settle", lambda: None)  # as on a device: nobody waits

    def pump():
        machine.pump()
        return [*done, (y.view_ == x.view_).all()]

    machine.hold(source)
    machine.put(source, lambda: done.append("before"))
    y = devices.put(x, 1)
    assert y.device.id == 1
    y.view_[...] = -1
    machine.put(source, lambda: done.append("source"))
    machine.put(target, lambda: done.append("target"))
    assert pump() == [False]  # the copy waits for what its source had to do
    machine.hold(target)
    machine.release(source)
    assert pump() == ["before", False]  # and what its source does next waits for the copy
    machine.release(target)
    assert sorted(pump()[1:3]) == ["source", "target"]
    assert pump()[-1]
    assert devices.put(x, 0) is x


def test_tasks_run_on_the_callers_streams(xp):
    driver = fake_cupy.driver()
    streams = [driver.create_stream(device) for device in (2, 0)]

    def look():
        device = driver.current_device()
        return device, driver.current_stream(device), threading.current_thread().name

    with driver.on(2, streams[0]), driver.on(0, streams[1]):
        seen = Devices(driver).run([2, 0, 1], [look] * 3)
        assert driver.current_device() == 0
        assert seen == [
            (2, streams[0], threading.current_thread().name),
            (0, streams[1], "replica on cuda:0"),
            (1, driver.current_stream(1), "replica on cuda:1"),
        ]


class Pair(NamedTuple):
    left: object
    right: object


class Mixed(Module):
    """y = (x * weight + bias * shift) of nested arguments; returns several things."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(np.arange(1.0, 4.0))
        self.unused = Parameter(np.ones(2))
        self.frozen = Parameter(np.full(3, 2.0), requires_grad=False)
        self.calls = Buffer(np.zeros(1))

    def forward(self, pair, *, extra, factor, scale):
        self.calls.data = self.calls.data + 1
        rows = pair.left.shape[0]
        x = pair.left + extra["more"][0]
        self.save_for_backward((x, scale))
        y = x * self.weight.data * self.frozen.data * scale + pair.right
        return {"y": [y, None], "rows": rows, "loss": (y * y).sum(), "factor": (factor,)}

    def save_for_backward(self, context):
        if self.training:
            self._saved.append(context)
            self.weight.expect_grad()
            self.frozen.expect_grad()

    def backward(self, grad):
        x, scale = self.saved()
        y, _ = grad["y"]
        self.weight.accumulate_grad((y * x * self.frozen.data * scale).sum(axis=0))
        self.frozen.accumulate_grad((y * x * self.weight.data * scale).sum(axis=0))
        inner = y * self.weight.data * self.frozen.data
        return Pair(inner * scale, y), (inner * x).sum()


def test_nested_arguments_and_results_are_divided_and_joined(xp):
    rng = np.random.default_rng(0)
    left, right, more, grad = (rng.normal(size=(5, 3)) for _ in range(4))
    alone, model = Mixed(), DataParallel(Mixed().map_arrays(xp.asarray), [0, 1, 2], dim=0)

    def call(module, array, backward):
        arrays = {"extra": {"more": (array(more),)}, "factor": "same", "scale": array(0.5)}
        output = module(Pair(array(left), array(right)), **arrays)
        factors = {"rows": None, "loss": None, "factor": (None,)}
        return output, module.backward({"y": [array(backward), None], **factors})

    output, back = call(model, xp.asarray, grad)
    expected, want = call(alone, np.asarray, grad)
    np.testing.assert_allclose(host(output["y"][0]), expected["y"][0], rtol=0, atol=1e-12)
    assert output["y"][1] is None
    assert output["factor"] == ("same",)
    assert host(output["rows"]).tolist() == [2, 2, 1]  # a number of each replica
    np.testing.assert_allclose(host(output["loss"]).sum(), expected["loss"], atol=1e-12)
    assert isinstance(back[0], Pair)
    for got, value in zip([*back[0], back[1]], [*want[0], want[1]], strict=True):
        np.testing.assert_allclose(host(got), value, rtol=0, atol=1e-12)
    np.testing.assert_allclose(host(model.module.weight.grad), alone.weight.grad, atol=1e-12)
    assert model.module.unused.grad is None
    assert model.module.frozen.grad is None
    assert not any(p.uses for p in model.parameters())
    # The first device's buffers win: one call, whatever the others counted.
    assert host(model.module.calls.data).tolist() == [1.0]
    assert list(model.state_dict()) == [
        f"module.{name}" for name in ("weight", "unused", "frozen", "calls")
    ]


class Halves(Module):
    """Two outputs of different numbers of rows."""

    def forward(self, x):
        self.save_for_backward(x)
        return x * x, x[::2]

    def backward(self, square, half):
        grad = square * self.saved() * 2
        grad[::2] += half
        return grad


def test_each_of_several_outputs_has_its_gradient(xp):
    x, square, half = np.arange(7.0), np.arange(1.0, 8.0), np.arange(1.0, 5.0)
    model = DataParallel(Halves(), [0, 1])
    first, second = model(x)  # parts of 4 and 3 rows, and of 2 and 2
    assert host(first).tolist() == (x * x).tolist()
    assert host(second).tolist() == [0, 2, 4, 6]
    expected = square * x * 2
    expected[::2] += half
    assert host(model.backward(xp.asarray(square), half)).tolist() == expected.tolist()


class Loss(Module):
    """A model with its loss, a number; and the other way round along ``dim`` 1."""

    def forward(self, x):
        self.save_for_backward(x)
        return float((x * x).sum())

    def backward(self, grad):
        return self.saved() * grad * 2


def test_a_number_of_each_replica_has_a_gradient_of_each(xp):
    x = np.arange(10.0).reshape(2, 5)
    model = DataParallel(Loss(), [1, 0, 2], dim=1)
    losses = model(xp.asarray(x))
    assert losses.device.id == 1
    with on(1):
        assert host(losses).tolist() == [(x[:, :2] ** 2).sum(), (x[:, 2:4] ** 2).sum(), 97.0]
        factors = xp.asarray(np.array([1.0, 10.0, 100.0]))
    back = model.backward(factors)
    assert host(back).tolist() == (x * 2 * np.array([1, 1, 10, 10, 100])).tolist()
    assert back.device.id == 0  # where the input was
    model(x)
    assert model.backward(2.0).device.id == 1  # the input was on the host


def test_replicas_draw_other_masks_and_the_first_one_those_of_the_module(xp):
    def make():
        return nn.Sequential(nn.Tanh(), nn.Dropout(rng=np.random.default_rng(5)))

    x = np.ones((64, 8))
    model = DataParallel(make().map_arrays(xp.asarray), [0, 1])
    first, second = (host(model(x)) for _ in range(2))
    parts = [first[:32], first[32:], second[:32], second[32:]]
    assert len({part.tobytes() for part in parts}) == 4
    alone = make()
    assert (alone(x[:32]) == parts[0]).all()
    assert (alone(x[:32]) == parts[2]).all()


class Fragile(Module):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(np.ones(1))

    def forward(self, x):
        self.save_for_backward(x)
        self.fail_on(x, 100.0, 200.0)
        return x * self.weight.data

    def backward(self, grad):
        self.fail_on(grad, 100.0, 200.0)
        self.weight.accumulate_grad((self.saved() * grad).sum(axis=0))
        return grad

    def fail_on(self, x, *values):
        for value in values:
            if bool((x == value).any()):
                raise ArithmeticError(f"found {value}")


def test_what_a_replica_raises_names_its_device(xp):
    model = DataParallel(Fragile().map_arrays(xp.asarray), [0, 2, 3])
    fine, broken = np.ones((3, 1)), np.array([[1.0], [100.0], [200.0]])

    def check(call, *args):
        with pytest.raises(ArithmeticError, match=r"found 100\.0") as caught:
            call(*args)
        assert caught.value.__notes__ == [
            "raised in the replica on cuda:2",
            "on cuda:3: ArithmeticError: found 200.0",
        ]
        assert not model.outstanding
        assert not model.module.outstanding
        assert model.module.weight.uses == 0
        assert model.module.weight.grad is None

    check(model, broken)
    model(fine)
    check(model.backward, broken)
    model(fine)
    model.backward(fine)
    assert host(model.module.weight.grad).tolist() == [3.0]


class Returns(Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        self.save_for_backward(None)
        return self.make(x)


def test_arguments_that_do_not_fit(xp):
    model = DataParallel(nn.Tanh(), [0, 1], dim=1)
    with pytest.raises(ValueError, match=r"dim 1: args\[0\] has 4, kwargs\['y'\] has 3; expected"):
        model(np.ones((2, 4)), y=np.ones((2, 3)))
    assert model(np.ones((2, 4))).shape == (2, 4)
    with pytest.raises(ValueError, match=r"gradient must have size 4 along dim 1.*\[2, 3\]"):
        model.backward(np.ones((2, 3)))
    model(np.ones((2, 4)))
    with pytest.raises(TypeError, match="2 positional and 0 named arguments; expected one"):
        model.backward(np.ones((2, 4)), np.ones((2, 4)))

    def returning(make):
        return DataParallel(Returns(make), [0, 1])(np.arange(4.0))

    with pytest.raises(TypeError, match=r"output\[0\] is 'a' and 'b' in the replicas"):
        returning(lambda x: ("a" if float(x[0]) < 2 else "b",))
    with pytest.raises(ValueError, match=r"output\['y'\] has shapes \[\[2\], \[\]\]"):
        returning(lambda x: {"y": x if float(x[0]) < 2 else None})
    with pytest.raises(ValueError, match="output: expected a tuple of 2 entries, got list"):
        returning(lambda x: (x, x) if float(x[0]) < 2 else [x])
    lock = nn.Tanh()
    lock.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied to cuda:0: .*lock"):
        DataParallel(lock)(np.ones(4))


def test_bad_construction(xp):
    model = nn.Sequential(nn.Linear(2, 2, rng=np.random.default_rng(0)).map_arrays(xp.asarray))
    for arguments, error, text in [
        (([],), ValueError, "device_ids is empty"),
        (
            ([0, 4],),
            ValueError,
            r"device_ids\[1\] is 4, but this process has 4 GPUs; expected 0 to 3",
        ),
        (([0, -1],), ValueError, r"device_ids\[1\] is -1"),
        (([0, 1, 0],), ValueError, "device_ids has 0 twice"),
        ((3,), TypeError, "device_ids must be a list of whole numbers"),
        (([0, 1.0],), TypeError, r"device_ids\[1\] must be a whole number"),
        (([0], 9), ValueError, "output_device is 9"),
        (([0], None, -1), ValueError, "dim must be at least 0"),
        (([1, 0],), ValueError, r"parameter 0\.weight is on cuda:0, expected on cuda:1, the first"),
    ]:
        with pytest.raises(error, match=text):
            DataParallel(model, *arguments)
    with pytest.raises(TypeError, match=r"must be a Module, got dict.*parallel\.jax\.DataParallel"):
        DataParallel({"weight": np.ones(2)})
    wrapped = DataParallel(model)
    assert wrapped.device_ids == [0, 1, 2, 3]
    with on(1):
        model[0].bias.data = xp.asarray(np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"parameter 0\.bias is on cuda:1, expected on cuda:0"):
        wrapped(np.ones((2, 2), np.float32))
    model[0].bias.data = np.ones(2, np.float32)
    with pytest.raises(ValueError, match=r"parameter 0\.bias is on the host"):
        DataParallel(model)


def test_without_a_gpu_it_says_what_there_is_instead(monkeypatch):
    instead = r"parallel\.jax\.DataParallel; for several processes.*DistributedDataParallel"
    module = nn.Linear(2, 2, rng=np.random.default_rng(0))

    def missing():
        raise DistBackendError("arrays on a GPU need CuPy")

    monkeypatch.setattr("transport._cuda.driver.cuda_driver", missing)
    with pytest.raises(DistBackendError, match=f"need CuPy.*{instead}"):
        DataParallel(module)
    monkeypatch.setattr("transport._cuda.driver.cuda_driver", lambda: HostDriver(HostMachine(0)))
    with pytest.raises(DistBackendError, match=f"no GPU is visible.*{instead}"):
        DataParallel(module)
