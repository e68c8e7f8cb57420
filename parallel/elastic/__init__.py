"""Training that goes on when ranks are lost, and when others come in their place."""

from parallel.elastic.batches import ElasticBatches, Share
from parallel.elastic.mesh import ElasticMesh
from parallel.elastic.outer import DiLoCo, LocalSGD
from parallel.elastic.step import Step

__all__ = ["DiLoCo", "ElasticBatches", "ElasticMesh", "LocalSGD", "Share", "Step"]
