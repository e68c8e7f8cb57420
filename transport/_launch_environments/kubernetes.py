"""Kubernetes: the pods of an Indexed Job, also as part of a JobSet, and of a LeaderWorkerSet."""

from __future__ import annotations

from pathlib import Path

from transport import _environment as environment
from transport._launch_environments.base import (
    LaunchEnvironment,
    NodePlace,
    Variables,
    needed_number,
    number_in,
)

_HOSTS = Path("/etc/hosts")


class IndexedJob(LaunchEnvironment):
    """A pod of a Job with ``completionMode: Indexed``; pod i has the hostname ``JOB-i``.

    Kubernetes sets no variable for the number of pods: the manifest sets ``JOB_COMPLETIONS``, or
    the user passes ``--nnodes``. Without a subdomain, pod 0 has no DNS name, and the user must set
    its address.
    """

    name = "Kubernetes"
    key = "kubernetes"

    def node(self, variables: Variables) -> NodePlace | None:
        if not variables.get("JOB_COMPLETION_INDEX"):
            return None
        index = needed_number(variables, "JOB_COMPLETION_INDEX", self.name)
        host = variables.get("HOSTNAME", "")
        job = host.removesuffix(f"-{index}")
        leader = variables.get(environment.MASTER_ADDR)
        if not leader and job != host:
            domain = subdomain(host, _HOSTS.read_text() if _HOSTS.exists() else "")
            leader = f"{job}-0.{domain}" if domain else None
        return NodePlace(
            self.name,
            variables.get("JOB_COMPLETIONS") or None,
            index,
            None,
            leader,
            number_in(variables, environment.MASTER_PORT),
            job or None,
        )


class LeaderWorkerSet(LaunchEnvironment):
    """A pod of a LeaderWorkerSet; the pod with index 0 of each group is the leader."""

    name = "LeaderWorkerSet"
    key = "lws"

    def node(self, variables: Variables) -> NodePlace | None:
        leader = variables.get("LWS_LEADER_ADDRESS")
        if not leader:
            return None
        return NodePlace(
            self.name,
            str(needed_number(variables, "LWS_GROUP_SIZE", self.name)),
            needed_number(variables, "LWS_WORKER_INDEX", self.name),
            None,
            leader,
            number_in(variables, environment.MASTER_PORT),
            leader,
        )


def subdomain(host: str, hosts: str) -> str:
    """Return the subdomain of the pod ``host`` from the text of /etc/hosts, or ``""``.

    Kubernetes writes lines ``IP NAME.SUBDOMAIN.NAMESPACE.svc.cluster.local NAME``.
    """
    for line in hosts.splitlines():
        names = line.split("#")[0].split()[1:]
        if host in names:
            full = next((name for name in names if name.startswith(f"{host}.")), "")
            if full.count(".") >= 2:
                return full.split(".")[1]
    return ""
