"""The examples of remote calls, over ranks that are threads: they learn what they are to learn."""

import ddp_embedding_server
import parameter_server
import pipeline
import split_rnn

from meshlib.testing import run_ranks
from tests.support.parallel.jax_settings import jax_settings


def test_a_parameter_server_averages_its_trainers():
    assert run_ranks(lambda: parameter_server.run(epochs=3), 3, timeout=50)[0] > 0.8


def test_microbatches_through_parts_on_workers():
    assert run_ranks(lambda: pipeline.run(epochs=7, microbatches=3), 3, timeout=50)[0] > 0.8


def test_a_recurrent_network_over_two_workers():
    with jax_settings(jax_disable_most_optimizations=True):
        losses = run_ranks(lambda: split_rnn.run(steps=25, length=12), 2, timeout=50)[0]
    assert losses[-1] < 0.7 * losses[0]


def test_data_parallel_trainers_with_an_embedding_server():
    means = run_ranks(lambda: ddp_embedding_server.run(steps=60), 3, timeout=50)[2]
    assert sum(means[-5:]) < 0.7 * sum(means[:5])
