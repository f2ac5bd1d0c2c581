"""`ScoringWorker`: an environment's reward model in one process, or one part of a divided model.

worker = ScoringWorker(config, "cuda")
worker.load()
worker.score(conversations)               # one `Score` each; its value is None on failure

Shapes: B conversations, L tokens of the longest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from treeward.config.policy import ShardingConfig
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ConfigError, DataError
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS
from treeward.parallel.mesh import make_mesh
from treeward.parallel.ray_cluster import free_port, start_ray
from treeward.parallel.sharding import shard
from treeward.parallel.tensor import cut
from treeward.processes import joined
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.score import Score
from treeward.scoring.scorer import PreparedScorer

logger = logging.getLogger(__name__)


class ScoringWorker:
    """Scores with the model of `config` on `device`, "cpu" or "cuda". `rank`: its rank in a group.

    With `cpu_offload` the weights are on the GPU only during `score`.
    """

    scorer: PreparedScorer
    """The model, from `load` on."""

    def __init__(self, config: RewardModelEnvironmentConfig, device: str, rank: int = 0) -> None:
        self._config, self._device, self._rank = config, device, rank
        self._offload = config.dtensor_cfg.cpu_offload and device != "cpu"
        self._group = contextlib.ExitStack()

    def _divide(self) -> None:
        """Keep this worker's part of each model: heads and columns (tensor parallelism), or, for a model that does not
        allow it, rows of all weights, which are gathered layer by layer."""
        cutting, sharding = make_mesh(self._config.dtensor_cfg), make_mesh(ShardingConfig())
        for member in self.scorer.members:
            try:
                cut(member.model, cutting)
                member.model.to(self._device)
            except ConfigError as error:
                logger.info(
                    "The reward model is sharded instead of tensor-parallel: %s", error.summary
                )
                shard(
                    member.model.requires_grad_(False), sharding, dtype=DTYPES[self._config.dtype]
                )

    def address(self) -> str:
        """The address `host:port` for a group to meet in this process."""
        return f"{start_ray().util.get_node_ip_address()}:{free_port()}"

    def load(self, address: str | None = None) -> None:
        """Load the model. `address`: of the group's first worker. Raises `ModelError` or `ConfigError`."""
        config, size = self._config, self._config.dtensor_cfg.tensor_parallel_size
        if address is not None:
            host, _, port = address.rpartition(":")
            # each worker sees its own GPU alone
            launched = {
                "RANK": self._rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": 0,
                "MASTER_ADDR": host,
            }
            os.environ.update(
                {name: str(value) for name, value in launched.items()}, MASTER_PORT=port
            )
            # of torchrun, where it has started Ray
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            self._group.enter_context(joined())
        only_size = config.batch_tokens is None and config.batch_size is not None
        self.scorer = load_scorer(
            config,
            device=self._device if size == 1 and not self._offload else "cpu",
            batch_tokens=None if only_size else config.batch_tokens or DEFAULT_BATCH_TOKENS,
            max_sequences=config.batch_size,
        )
        if size > 1:
            self._divide()

    def score(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`."""
        scorer = self.scorer
        if not self._offload:
            return scorer.score(conversations, on_error="mask")
        try:
            for member in scorer.members:
                member.model.to(self._device)
            return scorer.score(conversations, on_error="mask")
        finally:
            for member in scorer.members:
                member.model.to("cpu")
            torch.cuda.empty_cache()

    def preprocess(self, conversations: Sequence[AnyConversation]) -> dict[str, Tensor]:
        """See `RewardModelEnvironment.preprocess_data`."""
        scorer = self.scorer.members[0]
        if scorer.steps is not None:
            summary = "a process reward model reads steps: a conversation has not one value"
            raise ConfigError(summary, where=self._config.models[0])
        rows = []
        for item in scorer.prepare(conversations):
            if item.ids is None:
                raise DataError(
                    "the conversation cannot be tokenized", where=item.name, got=item.error
                )
            rows.append(item.ids)
        lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids_BL = torch.full(
            (len(rows), max(map(len, rows), default=0)), scorer.renderer.tokenizer.pad_token_id or 0
        )
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = torch.tensor(row)
        return {"input_ids": ids_BL, "input_lengths": lengths_B}

    def shutdown(self) -> None:
        """Free the model."""
        del self.scorer
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
