"""The program of the ranks of the GPU tests. Run by ``meshrun``: ``gpu_ranks.py BACKEND CHECK...``.

Each check that a rank has passed is a line ``passed RANK CHECK SECONDS``; the first one that it has
not ends it, with a traceback.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import meshlib as dist
from parallel import DistributedDataParallel, nn, optim
from tests.meshlib.collectives.test_oracle import all_cases, large_cases
from tests.support.meshlib.array_oracle import Spec, expect, perform, same
from tests.support.parallel import training

# Long enough that a collective which does not wait for it reads the old values.
_DELAY_PASSES = 200
_STEPS = 10
_POISONED = (64, 4096, 1 << 20, 16 << 20)
_LEAST_CASES = 500
_TIMEOUT = 40
# What neither CuPy's kernels nor JAX on a GPU have.
_HOSTS_ONLY = ("float128", "complex256", "longdouble", "clongdouble")


def delayed(cupy: Any, array: Any, value: float) -> None:
    """Fill ``array`` with garbage now and with ``value`` much later, on the current stream."""
    array.fill(np.nan)
    burn = cupy.ones((2048, 2048), cupy.float32)
    for _ in range(_DELAY_PASSES):
        burn = burn @ burn * 1e-4
    array.fill(value)


def poison(cupy: Any) -> None:
    """Leave memory full of garbage where the pool takes it from next."""
    for size in _POISONED:
        for _ in range(4):
            cupy.full(size // 4, np.nan, cupy.float32)


# ------------------------------------------------------------------ conformance


@dataclass(frozen=True)
class CupySpec(Spec):
    """A call on CuPy arrays."""

    def lay_out(self, values: Any) -> Any:
        cupy = import_module("cupy")
        laid = super().lay_out(values)
        if laid.flags.c_contiguous:
            return cupy.asarray(laid)
        if self.layout == "transposed":
            return cupy.asarray(laid.T.copy()).T
        return cupy.asarray(laid.base)[..., ::2]


@dataclass(frozen=True)
class JaxSpec(Spec):
    """A call on JAX arrays."""

    def lay_out(self, values: Any) -> Any:
        jax = import_module("jax")
        return jax.device_put(values, jax.devices("gpu")[0])


def on_host(result: Any) -> Any:
    """The same result in NumPy arrays."""
    if isinstance(result, list | tuple):
        return [on_host(part) for part in result]
    if hasattr(result, "get"):
        return result.get()
    return result if result is None or isinstance(result, int | float) else np.asarray(result)


def cases_for(made: type[Spec], can_hold: Callable[[np.dtype[Any]], bool]) -> list[Spec]:
    found = [spec for spec in all_cases() + large_cases() if spec.kind != "objects"]
    dtypes = {spec.dtype for spec in found}
    held = {dtype for dtype in dtypes if dtype.name not in _HOSTS_ONLY and can_hold(dtype)}
    print("dtypes:", ", ".join(sorted(dtype.name for dtype in held)), flush=True)
    return [made(**vars(spec)) for spec in found if spec.dtype in held]


def conform(cases: list[Spec]) -> None:
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert len(cases) >= _LEAST_CASES
    for number, spec in enumerate(cases):
        wanted = expect(spec, size)[rank]
        # By turns waited for by the call, and by a Work.
        result = perform(spec, group, async_op=number % 2 == 1)
        if isinstance(result, dist.Work):
            result = result.result()
        got = on_host(result)
        assert same(got, wanted), f"{spec}: {got!r} is not {wanted!r}"


def check_cupy_conformance(cupy: Any) -> None:
    def can_hold(dtype: np.dtype[Any]) -> bool:
        try:
            x = cupy.asarray(np.ones(3, dtype))
            return bool((x.get() == np.ones(3, dtype)).all()) and x[::2].copy().dtype == dtype
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            return False

    poison(cupy)
    conform(cases_for(CupySpec, can_hold))


def check_jax_conformance(cupy: Any) -> None:
    jax = import_module("jax")
    jax.config.update("jax_enable_x64", True)
    try:
        device = jax.devices("gpu")[0]

        def can_hold(dtype: np.dtype[Any]) -> bool:
            try:
                x = jax.device_put(np.ones(3, dtype), device)
                return cupy.from_dlpack(x).dtype == dtype
            except (TypeError, ValueError, RuntimeError, BufferError, NotImplementedError):
                return False

        conform(cases_for(JaxSpec, can_hold))
    finally:
        jax.config.update("jax_enable_x64", False)


# ------------------------------------------------------------------ order


def check_streams(cupy: Any) -> None:
    """Fails if a collective does not wait for the array's stream, or later work not for it."""
    size = dist.get_world_size()
    for count in (100, 4_000_000):
        for blocking in (True, False):
            with cupy.cuda.Stream(non_blocking=True):
                x = cupy.empty(count, cupy.float32)
                delayed(cupy, x, 1.0)
                if blocking:
                    dist.all_reduce(x)
                else:
                    dist.all_reduce(x, async_op=True).wait()
                x += 0.5
                assert (x.get() == size + 0.5).all(), (count, blocking)


def check_other_streams_wait(cupy: Any) -> None:
    """The stream that waits is another one than the call was issued on."""
    size = dist.get_world_size()
    issuing, waiting = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with issuing:
        x = cupy.empty(1_000_000, cupy.float32)
        delayed(cupy, x, 2.0)
        work = dist.all_reduce(x, async_op=True)
    with waiting:
        work.wait()
        y = x + 1
        assert (y.get() == 2 * size + 1).all()
    assert work.is_completed() or work.wait(20.0)


def check_lifetimes(cupy: Any) -> None:
    """Arrays that everybody forgets while a call on them is under way."""
    size = dist.get_world_size()
    for turn in range(20):
        x = cupy.empty(500_000, cupy.float32)
        delayed(cupy, x, 1.0) if turn % 5 == 0 else x.fill(1.0)
        dist.all_reduce(x, async_op=True)
        del x
        poison(cupy)
    y = cupy.ones(500_000, cupy.float32)
    dist.all_reduce(y)
    got = y.get()
    dist.barrier()  # a call that went wrong before is told here, and not as wrong values
    assert (got == size).all()


def check_no_host_block(cupy: Any) -> None:
    """Many calls are issued, one behind the other, while the device has not begun with the first.

    Not for the backends that go via the host, whose first step waits for the array.
    """
    size = dist.get_world_size()
    x = cupy.ones(1000, cupy.float64)
    dist.all_reduce(x)
    cupy.cuda.get_current_stream().synchronize()
    dist.barrier()
    delayed(cupy, x, 1.0)
    works = [dist.all_reduce(x, async_op=True) for _ in range(10)]
    for work in works:
        work.wait()
    assert (x.get() == float(size) ** 10).all()


# ------------------------------------------------------------------ the rest


def check_symmetric(cupy: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    x = group.empty((1000, 33), np.float32, device="cuda")
    for turn in range(5):
        x.fill(rank + turn)
        group.all_reduce(x)
        assert (x.get() == sum(range(size)) + turn * size).all()
        part = x[100 * rank : 100 * rank + 50]  # elsewhere on each rank
        part.fill(rank)
        group.all_reduce(part)
        assert (part.get() == sum(range(size))).all()
    del x, part
    y = group.empty((1000, 33), np.float32, device="cuda")
    y.fill(1)
    group.all_reduce(y)
    assert (y.get() == size).all()


def check_mismatch(cupy: Any) -> None:
    """Members that disagree are all told. Breaks a group of its own."""
    if dist.get_world_size() == 1:
        return
    group = dist.new_group()
    group.all_reduce(cupy.ones(4, cupy.float32))
    count = 4 + dist.get_rank()
    x = cupy.ones(count, cupy.float32)
    with pytest.raises(dist.CollectiveMismatchError, match="count=5"):
        group.all_reduce(x, async_op=True).wait(20.0)


def check_wrong_device(cupy: Any) -> None:
    """An array on the host and one on the GPU in one call."""
    x = cupy.ones(4, cupy.float32)
    with pytest.raises(ValueError, match="is on cpu"):
        dist.all_gather_into_tensor(np.empty(4 * dist.get_world_size(), np.float32), x)


def check_cupy_ddp(cupy: Any) -> None:
    """Modules of CuPy arrays end up where those of NumPy arrays do, over the CPU's transport."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def train(xp: Any) -> dict[str, Any]:
        model = training.make_model()
        model.map_arrays(xp.asarray)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
        optimizer = optim.AdamW(wrapped.parameters(), lr=0.01)
        loss = nn.CrossEntropyLoss()
        for step in range(_STEPS):
            x, y = (xp.asarray(part[rank::size]) for part in training.batch(step))
            optimizer.zero_grad()
            loss(wrapped(x), y)
            wrapped.backward(loss.backward())
            optimizer.step()
        return {path: on_host(value) for path, value in training.parameters(wrapped).items()}

    training.assert_close([train(cupy)], train(np), 1e-9)


def check_jax_jit(cupy: Any) -> None:
    """Collectives inside of a program, and behind and before work of the program's own."""
    import meshlib.jit as mj

    jax = import_module("jax")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = jax.device_put(np.full((500, 500), rank + 1, np.float32), jax.devices("gpu")[0])

    @jax.jit
    def program(x: Any) -> Any:
        y = mj.all_reduce(x @ x / 500)
        rows = mj.all_gather(y[:2, :2] * (rank + 1))
        return (y + 1) * 2, rows, mj.broadcast(x[0], 0)

    for _ in range(5):
        y, rows, first = program(x)
        total = sum((r + 1) ** 2 for r in range(size))
        assert np.allclose(np.asarray(y), (total + 1) * 2)
        expected = np.concatenate([np.full((2, 2), total * (r + 1)) for r in range(size)])
        assert np.allclose(np.asarray(rows).reshape(expected.shape), expected)
        assert (np.asarray(first) == 1).all()
    grad = jax.jit(jax.grad(lambda v: (mj.all_reduce(v) ** 2).sum()))(x[0])
    assert np.allclose(np.asarray(grad), 2 * size * sum(range(1, size + 1)))


def check_jax_training(cupy: Any) -> None:
    """Data parallel training in a program on the GPU, and in one on the CPU: the same weights."""
    from parallel.jax import DistributedDataParallel as Replicas

    jax = import_module("jax")
    rank = dist.get_rank()

    def train(device: Any) -> Any:
        with jax.default_device(device):
            rng = np.random.default_rng(0)
            weights = {
                "w": jax.device_put(rng.normal(size=(6, 4)).astype(np.float32), device),
                "b": jax.device_put(np.zeros(4, np.float32), device),
            }
            replicas = Replicas(weights)
            x = np.random.default_rng(rank).normal(size=(12, 6)).astype(np.float32)
            x, y = jax.device_put(x, device), jax.device_put(x[:, :4] ** 2, device)

            def loss(weights: Any, x: Any, y: Any) -> Any:
                with jax.default_matmul_precision("highest"):
                    return ((jax.numpy.tanh(x @ weights["w"] + weights["b"]) - y) ** 2).mean()

            @jax.jit
            def step(weights: Any, x: Any, y: Any) -> Any:
                _, grads = replicas.value_and_grad(loss)(weights, x, y)
                return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

            weights = replicas.params
            for _ in range(_STEPS):
                weights = step(weights, x, y)
            return jax.tree.map(np.asarray, weights)

    on_gpu, on_cpu = train(jax.devices("gpu")[0]), train(jax.devices("cpu")[0])
    for name, values in on_cpu.items():
        assert np.allclose(on_gpu[name], values, atol=1e-5), name


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}
JAX_CHECKS = [name for name in CHECKS if name.startswith("jax")]


def main() -> None:
    backend, *names = sys.argv[1:]
    if limit := os.environ.get("MESHLIB_GPU_RANK_SECONDS"):
        faulthandler.dump_traceback_later(float(limit))
    cupy = import_module("cupy")
    if any(name in JAX_CHECKS for name in names):
        import_module("jax")  # before a call of ours makes it look for devices
    dist.init_process_group(f"cpu:auto,cuda:{backend}", timeout=_TIMEOUT)
    for name in names:
        started = time.perf_counter()
        CHECKS[name](cupy)
        dist.barrier()
        took = time.perf_counter() - started
        print(f"passed {dist.get_rank()} {name} {took:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
