# pyright: reportMissingImports=false, reportUnknownParameterType=false, reportUntypedBaseClass=false
# pyright: reportAttributeAccessIssue=false
# (the checks do not install the engine)
"""meshlib under Ray Train: ``MeshlibTrainer``, the counterpart of ``TorchTrainer``.

Ray places the workers, restarts them and stores checkpoints; each worker is a rank. Ray Train's
controller, which outlives the ranks, serves their store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from meshlib.engines._variables import AttemptStore, AttemptVariables

_LEAVING_SECONDS = 5.0


@dataclass
class MeshlibConfig(BackendConfig):
    """Options of ``MeshlibTrainer``, whose workers are ranks.

    The arguments ``backend`` and ``timeout`` (seconds) are those of ``init_process_group``. Unless
    ``init`` is false, the default process group exists while the training function runs.

    ``init_device_mesh()`` without arguments returns ``mesh``, such as ``dp=2,tp=2``, which needs a
    fixed number of workers.
    """

    backend: str | None = None
    timeout: float = 300.0
    mesh: str | None = None
    init: bool = True

    @property
    def backend_cls(self) -> type[Backend]:
        """See Ray."""
        return _MeshlibBackend

    def to_dict(self) -> dict[str, Any]:
        """Return this configuration in the form that Ray shows."""
        return {"backend": self.backend, "timeout": self.timeout, "mesh": self.mesh}


class MeshlibTrainer(DataParallelTrainer):
    """A trainer that runs ``train_loop_per_worker`` on all workers as the ranks of one job.

    ``meshlib_config`` is a ``MeshlibConfig``. Other arguments are ``DataParallelTrainer``'s:
    ``train_loop_config``, ``scaling_config``, ``run_config`` (its ``failure_config`` limits the
    restarts), ``datasets``.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        meshlib_config: MeshlibConfig | None = None,
        **options: Any,
    ) -> None:
        config = meshlib_config or MeshlibConfig()
        super().__init__(train_loop_per_worker, backend_config=config, **options)


class _MeshlibBackend(Backend):
    """The backend in the controller. Ray calls ``on_start`` for each new group of workers."""

    share_cuda_visible_devices = True  # LOCAL_RANK selects the GPU

    def __init__(self) -> None:
        self._attempt: AttemptStore | None = None
        self._attempts = 0

    def on_start(self, worker_group: Any, backend_config: MeshlibConfig) -> None:
        """Serve a store for these workers, and make them ranks."""
        self._close()  # a store whose on_shutdown was not called
        name = f"ray-{ray.get_runtime_context().get_job_id()}"
        host, mesh = ray.util.get_node_ip_address(), backend_config.mesh
        self._attempt = AttemptStore(host, name, mesh, self._attempts)
        self._attempts += 1
        places = ray.get(worker_group.execute_async(_where))
        nodes = [node for _, node in sorted(places)]
        worker_group.execute(_become_rank, self._attempt.job, nodes)
        if backend_config.init:
            worker_group.execute(_init, backend_config.backend, backend_config.timeout)

    def on_shutdown(self, worker_group: Any, backend_config: MeshlibConfig) -> None:
        """Let the remaining workers leave the job, then close the store."""
        try:
            if backend_config.init:
                with contextlib.suppress(Exception):  # lost or blocked workers
                    ray.get(worker_group.execute_async(_leave), timeout=_LEAVING_SECONDS)
        finally:
            self._close()

    def _close(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()


def _where() -> tuple[int, str]:
    """Return this worker's rank, and its node as Ray names it."""
    return ray.train.get_context().get_world_rank(), ray.get_runtime_context().get_node_id()


def _become_rank(job: AttemptVariables, nodes: list[str]) -> None:
    rank, host = ray.train.get_context().get_world_rank(), ray.util.get_node_ip_address()
    os.environ.update(job.variables(rank, nodes, host))


def _init(backend: str | None, timeout: float) -> None:
    import meshlib

    meshlib.init_process_group(backend, timeout=timeout)


def _leave() -> None:
    import meshlib

    if meshlib.is_initialized():
        meshlib.destroy_process_group()
