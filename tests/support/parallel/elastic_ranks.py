"""A job whose ranks are threads that may be killed, and joined by others."""

from __future__ import annotations

import threading

import numpy as np

import meshlib as dist
from meshlib._groups.backend import parse_backend
from meshlib._job.current import current_world, install
from meshlib._job.world import World
from parallel import DistributedDataParallel, fully_shard, nn, optim
from parallel.elastic import ElasticBatches, ElasticMesh
from transport._communicators.runtime import Runtime
from transport._rendezvous.rank_claims import next_job_part
from transport._store.hash_store import HashStore

WAIT = 60.0


class KilledError(BaseException):
    """Ends a rank as SIGKILL would: at once, and its peers hear of it from whoever watches."""


class ThreadJob:
    """Runs ``program(job)`` as each rank; ``kill()`` in it ends the rank, ``start`` adds one."""

    def __init__(self, program, size, *, backend="inproc", timeout=WAIT):
        self.size, self.timeout = size, timeout
        self.results, self.errors = {}, {}
        self._program, self._backends = program, parse_backend(backend)
        self._store = HashStore()
        self._threads = []
        self._lock = threading.Lock()
        self._next = size
        for rank in range(size):
            self._begin(rank, joining=False)

    def start(self):
        """Start one more rank, which joins; return its global rank."""
        with self._lock:
            rank, self._next = self._next, self._next + 1
        self._begin(rank, joining=True)
        return rank

    def kill(self):
        """End the calling rank."""
        raise KilledError

    def join(self):
        """Wait for all ranks and return what those have returned that were not killed, by rank."""
        for thread in self._threads:
            thread.join(2 * self.timeout)
        late = [thread.name for thread in self._threads if thread.is_alive()]
        assert not late, late
        for error in self.errors.values():
            raise error
        return self.results

    def _begin(self, rank, *, joining):
        thread = threading.Thread(
            target=self._run, args=(rank, joining), name=f"rank-{rank}", daemon=True
        )
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _run(self, rank, joining):
        world = None
        try:
            world = World(
                next_job_part(self._store.clone(), rank),
                rank,
                self.size,
                runtime=Runtime(),
                backends=self._backends,
                timeout=self.timeout,
                joining=joining,
            ).join()
            install(world, thread_only=True)
            self.results[rank] = self._program(self)
        except KilledError:
            world.announce_exit("was killed")
        except BaseException as error:  # noqa: BLE001 (``join`` raises it)
            self.errors[rank] = error
            if world is not None:
                world.announce_exit(f"raised {error!r}")
        finally:
            install(None, thread_only=True)
            if world is not None:
                world.close(drain=0.0, linger=0.0)


# ---------------------------------------------------------------------- a training to be replayed

FEATURES, SAMPLES = 6, 40
INPUTS = np.random.default_rng(5).standard_normal((SAMPLES, FEATURES))
TARGETS = np.tanh(INPUTS @ np.arange(1.0, FEATURES + 1) / FEATURES)[:, None]


def make_model():
    generator = np.random.default_rng(11)
    layers = [nn.Linear(one, two, rng=generator) for one, two in ((FEATURES, 8), (8, 1))]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
    return model.map_arrays(lambda array: array.astype(np.float64))


def make_batches(policy="keep", size=12):
    return ElasticBatches(SAMPLES, size, policy=policy, seed=3)


def backward(model, samples, weight):
    """Add the gradients of ``weight`` times the mean square error of ``samples``."""
    output = model(INPUTS[samples])
    count = max(len(samples), 1)
    model.backward(2 * weight * (output - TARGETS[samples]) / count)


def replay(log, *, lr=0.1):
    """Return the parameters after the steps of ``log`` (their samples), in one process."""
    model = make_model()
    optimizer = optim.Adam(model.parameters(), lr=lr)
    for samples in log:
        backward(model, samples, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.data.copy() for parameter in model.parameters()]


def build(kind, mesh):
    model = make_model()
    if kind == "ddp":
        return DistributedDataParallel(model, mesh["dp"])
    fully_shard(model[0], mesh["dp_replicate", "dp_shard"])
    return fully_shard(model, mesh["dp_replicate", "dp_shard"])


def values_of(model):
    return [
        np.array(p.value.full_array() if p.global_part is not None else p.data)
        for p in model.parameters()
    ]


def train(job, shape, until, *, kind="ddp", event=None, policy="keep", log=None, **options):
    """Train; ``event(elastic, step, where)`` is called in each step; returns the parameters."""
    names = ("dp",) if len(shape) == 1 else ("dp_replicate", "dp_shard")
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    event = event or (lambda *_: None)
    with ElasticMesh(mesh, names[0], **{"timeout": job.timeout, **options}) as elastic:
        model = build(kind, elastic.mesh)
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        for step in elastic.steps(state, until, batches=make_batches(policy)):
            with step as current:
                event(elastic, step, "begin")
                backward(model, step.share.samples, step.share.weight)
                event(elastic, step, "computed")
                if log is not None:
                    note = (step.number, step.share.samples.tolist(), current.mesh.ravel().tolist())
                    step.on_commit(log.append, (current_world().rank, *note))
                step.on_commit(optimizer.step)
                step.on_commit(optimizer.zero_grad)
            event(elastic, step, "ended")
        assert current_world().recorder.steps.count in (0, elastic.committed)
        return (
            values_of(model) if elastic.placed else [],
            elastic.committed,
            elastic.mesh.mesh.tolist(),
        )


def check(results, log, until, members=None, policy="keep"):
    """All that are left have the same parameters, bit for bit: those of a replay of ``log``."""
    first = next(iter(results.values()))
    assert all(one[1] == until for one in results.values())
    for one in results.values():
        for mine, theirs in zip(one[0], first[0], strict=True):
            assert mine.tobytes() == theirs.tobytes()
    order = samples_of(log, results, until, make_batches(policy))
    for mine, theirs in zip(replay(order), first[0], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-10)
    used = np.concatenate(order)
    for begin in range(0, len(used), SAMPLES):
        one_pass = used[begin : begin + SAMPLES]
        assert len(set(one_pass.tolist())) == len(one_pass)
    if members is not None:
        assert sorted(results) == members


def samples_of(log, results, until, batches):
    """Return the samples of each step that those who are left have committed.

    What only a rank has committed that was lost then, the others have done again.
    """
    tried = {number: ranks for rank, number, _, ranks in log if rank in results}
    assert sorted(tried) == list(range(until))
    order, cursor = [], 0
    for number in range(until):
        ranks = tried[number]
        shares = [batches.share(cursor, i, len(ranks), 1).samples for i in range(len(ranks))]
        committed = [entry for entry in log if entry[1] == number and entry[3] == ranks]
        assert len({entry[0] for entry in committed}) == len(committed), committed
        for rank, _, samples, _ in committed:
            assert samples == shares[ranks.index(rank)].tolist()
        order.append(np.concatenate(shares))
        cursor += len(order[-1])
    return order
