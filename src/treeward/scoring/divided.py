"""`DividedScorer`: a reward model whose parts lie in several processes, each with a GPU of its own.

    scorer = DividedScorer(config, size=2, device="cuda", batch_tokens=4096)    # Ray runs
    scorer.score(conversations)                 # the scores of `Scorer`, up to rounding

It is for a model that does not fit into one GPU. This process holds the first part, and actors of
Ray on the same node hold the others. All of them compute the same tokens at the same time, and
what they have computed is exchanged within each layer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray

from treeward.config.policy import ShardingConfig
from treeward.config.scoring import ScoringConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ConfigError, TreewardError
from treeward.model.pretrained import DTYPES
from treeward.parallel.mesh import make_mesh
from treeward.parallel.ray_cluster import free_port
from treeward.parallel.sharding import shard
from treeward.parallel.tensor import cut
from treeward.processes import joined
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.score import OnError, Score
from treeward.scoring.scorer import Prepared, PreparedScorer

logger = logging.getLogger(__name__)


class DividedScorer(PreparedScorer):
    """Scores with the models of `config`, each divided over `size` processes.

    `device`: "cuda" or "cpu", of each process. `capacity`: arguments of `Scorer.load`; there is no
    cache of prompts, because each process would have to drop the same ones. If one of the other
    processes is lost, this process ends: the parts that are left cannot score, and Ray Serve
    starts another replica. Raises `ModelError` and `ConfigError` as `load_scorer`.
    """

    def __init__(self, config: ScoringConfig, size: int, *, device: str, **capacity: Any) -> None:
        own_resources = ray.get_runtime_context().get_assigned_resources()
        actor: Any = ray.remote(ModelPart)
        # Of the placement group that Ray Serve has made for this replica: on the same node.
        like_this_one = actor.options(
            num_cpus=own_resources.get("CPU", 1.0),
            num_gpus=own_resources.get("GPU", 0.0),
        )
        own_part = ModelPart(0, size, device)
        self._others = [like_this_one.remote(rank, size, device) for rank in range(1, size)]
        address = ray.util.get_node_ip_address()
        port = free_port()
        # The others are asked first and waited for last: loading is done by all at the same time,
        # and each waits for the rest to join its group.
        loading = [other.load.remote(config, address, port, capacity) for other in self._others]
        own_part.load(config, address, port, capacity)
        ray.get(loading)
        self._own_part = own_part
        self.members = self.own_scorer.members
        self.renderer = self.own_scorer.renderer

    @property
    def own_scorer(self) -> PreparedScorer:
        """What this process holds: it describes the models, and cannot score alone."""
        return self._own_part.scorer

    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        return self.own_scorer.prepare(conversations, where=where, on_error=on_error)

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        return self.own_scorer.prepare_texts(texts)

    def score_prepared(
        self,
        prepared: Sequence[Prepared],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        scoring = [other.score.remote(prepared, on_error) for other in self._others]
        try:
            scores = self._own_part.score(prepared, on_error)
            ray.get(scoring)
        except TreewardError:
            # Of the conversations: every part has raised it.
            raise
        except Exception:
            # At once and without clean-up, which would wait for the part that is lost.
            logger.exception("A part of the model is lost, and with it this process.")
            os._exit(1)
        return scores


class ModelPart:
    """The part of the models that process `rank` of `size` holds."""

    scorer: PreparedScorer
    """From `load` on."""

    def __init__(self, rank: int, size: int, device: str) -> None:
        self._rank = rank
        self._size = size
        self._device = device
        # Never closed: the parts exchange what they compute for as long as the process lives.
        self._group = contextlib.ExitStack()

    def load(self, config: ScoringConfig, address: str, port: int, capacity: Any) -> None:
        """Load the models and keep this part of them. The processes meet at `address`."""
        launched = {
            "RANK": self._rank,
            "WORLD_SIZE": self._size,
            # Each process sees its own GPU alone.
            "LOCAL_RANK": 0,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in launched.items()})
        # Left from torchrun, if it has started Ray: the processes would look for its store.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        self._group.enter_context(joined())
        # On the CPU, because the whole model does not fit into one GPU.
        self.scorer = load_scorer(config, device="cpu", **capacity)
        cutting = make_mesh(ShardingConfig(tensor_parallel_size=self._size))
        sharding = make_mesh(ShardingConfig())
        # A model that is named twice is one member twice, and can be cut once.
        for member in dict.fromkeys(self.scorer.members):
            try:
                # Heads of attention and columns of matrices.
                cut(member.model, cutting)
                member.model.to(self._device)
            except ConfigError as error:
                # Rows of all weights, which each layer gathers before it computes.
                logger.info("The model is sharded, not tensor-parallel: %s", error.summary)
                frozen = member.model.requires_grad_(False)
                shard(frozen, sharding, dtype=DTYPES[config.dtype])

    def score(self, prepared: Sequence[Prepared], on_error: OnError) -> list[Score]:
        """The scores, which are the same in each process of the group."""
        return self.scorer.score_prepared(prepared, on_error=on_error)
