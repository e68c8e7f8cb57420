"""Under a Ray cluster of two nodes on this machine: ``make test-ray``."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs Ray: make test-ray")

import ray
import ray.train
from ray.cluster_utils import Cluster
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig

from meshlib.engines.ray import MeshlibConfig, MeshlibTrainer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster():
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    made.add_node(num_cpus=2)
    paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    ray.init(address=made.address, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield made
    ray.shutdown()
    made.shutdown()


def train(config):
    """Six steps with a checkpoint each; rank 1 fails at step 3 of the first attempt."""
    import meshlib as dist

    start = 0
    last = ray.train.get_checkpoint()
    if last:
        with last.as_directory() as folder:
            start = json.loads(Path(folder, "state.json").read_text())["step"] + 1
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["MESHLIB_RESTART_COUNT"])
    for step in range(start, 6):
        x = np.array([rank + 1.0 + step])
        dist.all_reduce(x)
        if config["fails"] and (step, rank, attempt) == (3, 1, 0):
            if config["fails"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the cause")
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                Path(folder, "state.json").write_text(json.dumps({"step": step}))
                checkpoint = Checkpoint.from_directory(folder)
            metrics = {"sum": float(x[0]), "step": step, "size": size}
            metrics |= {"start": start, "attempt": attempt, "local": os.environ["LOCAL_RANK"]}
            ray.train.report(metrics, checkpoint=checkpoint)


def fit(folder, fails="", failures=0, **scaling):
    trainer = MeshlibTrainer(
        train,
        train_loop_config={"fails": fails},
        scaling_config=ScalingConfig(
            **({"num_workers": 2, "placement_strategy": "STRICT_SPREAD"} | scaling)
        ),
        run_config=RunConfig(
            name="t", storage_path=str(folder), failure_config=FailureConfig(max_failures=failures)
        ),
    )
    return trainer.fit()


def test_workers_on_two_nodes_are_ranks(cluster, tmp_path):
    metrics = fit(tmp_path).metrics
    assert (metrics["size"], metrics["step"], metrics["sum"]) == (2, 5, 13.0)
    assert (metrics["attempt"], metrics["local"]) == (0, "0")


@pytest.mark.parametrize("fails", ["raise", "kill"])
def test_a_failure_is_tried_again_from_the_last_checkpoint(cluster, tmp_path, fails):
    metrics = fit(tmp_path, fails, failures=1).metrics
    assert (metrics["attempt"], metrics["step"]) == (1, 5)
    # The last report of a process that is killed may not have reached Ray.
    assert metrics["start"] in ((3,) if fails == "raise" else (2, 3))
    assert metrics["sum"] == 13.0


def test_the_cause_comes_back(cluster, tmp_path):
    with pytest.raises(Exception, match="the cause"):
        fit(tmp_path, "raise")


def test_an_elastic_number_of_workers(cluster, tmp_path):
    """Five are wished for; the cluster has four processors."""
    metrics = fit(tmp_path, num_workers=(1, 5), placement_strategy="PACK").metrics
    assert 1 <= metrics["size"] <= 4
    size = metrics["size"]
    assert metrics["sum"] == sum(rank + 6.0 for rank in range(size))


def test_what_the_configuration_says():
    config = MeshlibConfig(mesh="dp=2", timeout=5)
    assert config.to_dict() == {"backend": None, "timeout": 5, "mesh": "dp=2"}
