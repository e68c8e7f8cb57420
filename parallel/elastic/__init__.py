"""Training that continues when ranks are lost, and when other ranks replace them."""

from parallel.elastic._batches import ElasticBatches, Share
from parallel.elastic._mesh import ElasticMesh
from parallel.elastic._outer import DiLoCo
from parallel.elastic._step import Step

__all__ = ["DiLoCo", "ElasticBatches", "ElasticMesh", "Share", "Step"]
