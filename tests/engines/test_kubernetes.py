"""The manifests in examples/kubernetes: valid for the API server, and what their pods do."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshlib._launcher.options.arguments import parse

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
KUBERNETES = "1.31"


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods():
    """Each manifest's pod, and the variables that the engine adds to those of the manifest."""
    job_set = documents("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = documents("indexed-job.yaml")[1]["spec"]
    runtime = documents("trainer-runtime.yaml")[0]["spec"]["template"]["spec"]
    (replicated,) = runtime["replicatedJobs"]
    torch = {
        **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"},
        **{"PET_MASTER_ADDR": "train-node-0-0.train", "PET_MASTER_PORT": "29500"},
    }
    index = {"JOB_COMPLETION_INDEX": "1"}
    return {
        "jobset": (job_set["template"]["spec"], index | {"HOSTNAME": "train-workers-0-1"}),
        "job": (job["template"]["spec"], index | {"HOSTNAME": "train-1"}),
        "trainer": (replicated["template"]["spec"]["template"]["spec"], index | torch),
    }


@pytest.mark.parametrize("name", ["jobset", "job", "trainer"])
def test_what_a_pod_starts(name, monkeypatch, tmp_path):
    """The second pod knows that it is node 1 of 2, where node 0 is, and how many ranks to start."""
    pod, variables = pods()[name]
    (container,) = pod["containers"]
    for item in container["env"]:
        monkeypatch.setenv(item["name"], item.get("value", ""))
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MESHLIB_SECRET", "ab" * 32)
    if name == "jobset":
        monkeypatch.setenv("MESHLIB_ENGINE_RESTARTS", "2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    command, *arguments = container["command"]
    assert command == "meshrun"
    options = parse(arguments)
    nodes = options.nodes
    assert (nodes.least, nodes.most, nodes.rank, nodes.port) == (2, 2, 1, 29500)
    assert options.ranks == 4
    hosts = {"jobset": "train-workers-0-0.train", "job": "train-0.train"}
    assert nodes.host == hosts.get(name, "train-node-0-0.train")
    assert nodes.job == {"jobset": "train-workers-0~2", "job": "train"}.get(name, "none")


@pytest.mark.parametrize("name", ["jobset", "job", "trainer"])
def test_what_every_pod_needs(name):
    pod, _ = pods()[name]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert (mount["mountPath"], mount["name"]) == ("/dev/shm", volume["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    assert pod["terminationGracePeriodSeconds"] > 30  # what ranks get to save
    (secret,) = [item for item in container["env"] if item["name"] == "MESHLIB_SECRET"]
    assert "secretKeyRef" in secret["valueFrom"]


def test_counts_agree():
    for spec in (
        documents("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"],
        documents("indexed-job.yaml")[1]["spec"],
    ):
        (count,) = [
            item["value"]
            for item in spec["template"]["spec"]["containers"][0]["env"]
            if item["name"] == "JOB_COMPLETIONS"
        ]
        assert spec["completions"] == spec["parallelism"] == int(count)
        assert spec["completionMode"] == "Indexed"


def assert_within(part, whole, where):
    """Models add fields that have a default, and nothing else."""
    if isinstance(part, dict):
        for key, value in part.items():
            assert key in whole, f"{where} has no {key}"
            assert_within(value, whole[key], f"{where}.{key}")
    elif isinstance(part, list):
        assert len(part) == len(whole), where
        for number, pair in enumerate(zip(part, whole, strict=True)):
            assert_within(*pair, f"{where}[{number}]")
    else:
        assert part == whole, where


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("jobset.yaml", "JobsetV1alpha2JobSet"),
        ("trainer-runtime.yaml", "TrainerV1alpha1ClusterTrainingRuntime"),
        ("trainjob.yaml", "TrainerV1alpha1TrainJob"),
    ],
)
def test_the_resources_own_models_lose_nothing(name, kind):
    """They raise for a wrong type, and drop a field that they do not know."""
    reason = "needs Kubeflow's models: make test-kubernetes"
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    (document,) = documents(name)
    assert_within(document, getattr(models, kind).from_dict(document).to_dict(), kind)


def test_kubernetes_own_schemas():
    reason = "needs Kubernetes' schemas: make test-kubernetes"
    schemas = pytest.importorskip("kubernetes_validate", reason=reason)
    for document in documents("indexed-job.yaml"):
        schemas.validate(document, KUBERNETES, strict=True)
    # The pods and jobs inside the others are Kubernetes' as well.
    job_set = documents("jobset.yaml")[0]["spec"]["replicatedJobs"][0]["template"]["spec"]
    runtime = documents("trainer-runtime.yaml")[0]["spec"]["template"]["spec"]
    for spec in (job_set, runtime["replicatedJobs"][0]["template"]["spec"]):
        document = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
        schemas.validate(document | {"spec": spec}, KUBERNETES, strict=True)
