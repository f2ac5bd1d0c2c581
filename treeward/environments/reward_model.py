"""`RewardModelEnvironment`: a reward model as the environment of an RL loop, here or as Ray actors.

    env = RewardModelEnvironment({"model_name": "results/rm/final", "batch_size": 32})
    env.step(message_logs, env_infos).rewards                                # float32 (B,)

    env = RewardModelEnvironment.remote(env_config)                          # the same, as a Ray actor
    ray.get(env.step.remote(message_logs, env_infos)).rewards

`env_config` is the section `env.reward_model` of an RL configuration: `RewardModelEnvironmentConfig`. Conversations are
rendered and read as in training, and those that share a prompt share its computation; whoever shares the load, and
whatever else is in the batch, the rewards are the same. What has no reward is NaN, says why in the metadata, and is out
of the loss after `global_post_process_and_metrics`.

Several replicas of the model are Ray actors in any case. A worker that dies is restarted and its part of the step done
again; running statistics live in this object and not in the workers.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.config.load import load_section
from treeward.config.reward_shaping import RewardShapingConfig
from treeward.data.preference import Message
from treeward.environments.actors import NO_RESTARTS, RayActor
from treeward.environments.interface import Environment, Reward, conversation_of, undone_on_failure
from treeward.environments.replicas import ReplicaPool
from treeward.environments.replies import plain
from treeward.environments.worker import ScoringWorker
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError, TreewardError
from treeward.model.contract import read_contract
from treeward.model.reward_model import RewardModel
from treeward.scoring.rewarding import Rewarder, load_shaper
from treeward.scoring.score import Score
from treeward.scoring.scorer import check_conversation
from treeward.scoring.shaping import Shaper

__all__ = ["RewardModelEnvironment"]

logger = logging.getLogger(__name__)

_WHERE = "env_config"

Workers = Literal["auto", "here", "ray"]


class RewardModelEnvironment(RayActor, Environment):
    """Rewards conversations by a reward model.

    `workers`: "here" runs the model in this process, "ray" in Ray actors; "auto" is here for one replica, unless this
    process is itself a Ray actor that was given no GPU and the model is to have one. `where`: what errors call the
    section. Raises `ConfigError` for a configuration that is wrong or asks for more than there is, `ModelError` for a
    model that cannot be loaded.
    """

    name = "reward_model_env"

    def __init__(
        self,
        env_config: Mapping[str, Any] | RewardModelEnvironmentConfig,
        *,
        workers: Workers = "auto",
        where: str = _WHERE,
    ) -> None:
        self.config = _checked(env_config, workers, where)
        self._lock = threading.Lock()  # steps may come from several threads; the model takes one at a time
        self._rewarder = Rewarder(
            lambda conversations, _: self._running().score(conversations), _make_shaper(self.config)
        )
        self._workers: ScoringWorker | ReplicaPool | None
        if workers == "ray" or (workers == "auto" and _needs_ray(self.config)):
            self._workers = ReplicaPool(self.config)
        else:
            self._workers = _worker_here(self.config, where)

    @classmethod
    def prepare_remote(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        config = _checked(*args, **kwargs)
        retries = {"max_restarts": config.max_retries, "max_task_retries": config.max_retries}
        options = dict(NO_RESTARTS) if _may_be_running(config) else retries
        return (config,), {"workers": "ray"}, options

    def rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return self._rewarded(conversations, env_infos, update=True)

    def evaluation_rewards(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]]
    ) -> list[Reward]:
        return self._rewarded(conversations, env_infos, update=False)

    def _rewarded(
        self, conversations: Sequence[Sequence[Message]], env_infos: Sequence[Mapping[str, Any]], *, update: bool
    ) -> list[Reward]:
        with self._lock, undone_on_failure(self):
            key = self._rewarder.reference_key
            references = None if key is None else [plain(info.get(key)) for info in env_infos]
            rewards = [
                replace(reward, components=_components(reward.score))
                for reward in self._rewarder.rewards(conversations, references, update=update)
            ]
            self._report_failures(rewards)
        return rewards

    def preprocess_data(self, message_logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
        """`{"input_ids": int64 (B, L), "input_lengths": int64 (B,)}`, right-padded, as the model is given them.

        Only where the model runs in this process. Raises `DataError` for a conversation that has no answer, cannot be
        rendered or is too long.
        """
        renderer = self._here("preprocess_data").scorer.renderer
        names = [f"conversation {i}" for i in range(len(message_logs))]
        logs = [
            check_conversation(conversation_of(log, name), name) for log, name in zip(message_logs, names, strict=True)
        ]
        rows = []
        for (fitted, num_tokens), name in zip(renderer.fit_many(logs, where=names), names, strict=True):
            if fitted is None:
                raise DataError(
                    "the conversation is too long",
                    where=name,
                    got=f"{num_tokens} tokens",
                    need=f"at most {renderer.max_length}",
                )
            rows.append(fitted.token_ids)
        lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids_BL = torch.full((len(rows), max(map(len, rows), default=0)), renderer.tokenizer.pad_token_id or 0)
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = torch.tensor(row)
        return {"input_ids": ids_BL, "input_lengths": lengths_B}

    @property
    def reward_model_policy(self) -> RewardModel:
        """The model itself, whose `score(preprocess_data(logs))["scores"]` are scores without shaping.

        Only where one model runs in this process.
        """
        models = self._here("reward_model_policy").models
        if len(models) > 1:
            raise ConfigError("an ensemble has no one model", field="model_name", got=list(self.config.model_names))
        return models[0]

    def process_ids(self) -> list[int]:
        """The processes that hold the model: this one, or those of the workers, each on its node."""
        workers = self._running()
        return workers.process_ids() if isinstance(workers, ReplicaPool) else [workers.load()]

    @property
    def is_stateful(self) -> bool:
        shaper = self._rewarder.shaper
        return shaper is not None and shaper.config.running

    def state_dict(self) -> dict[str, Any]:
        """What a run must save to go on exactly: running statistics, if there are any. JSON."""
        shaper = self._rewarder.shaper
        return {"reward_shaping": shaper.state_dict() if shaper else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` for that of another configuration."""
        if "reward_shaping" not in state:
            raise CheckpointError("this is not the state of a reward-model environment", got=sorted(state))
        if self._rewarder.shaper is not None:
            self._rewarder.shaper.load_state_dict(state["reward_shaping"])
        elif state["reward_shaping"]:
            raise CheckpointError(
                "the checkpoint has the statistics of a reward shaping that is switched off",
                need="the configuration that the run was started with",
            )

    def shutdown(self) -> bool:
        """Free the model and end the workers. It can be called twice; a step afterwards is an error."""
        workers, self._workers = self._workers, None
        if isinstance(workers, ReplicaPool):
            workers.shutdown()
        if isinstance(workers, ScoringWorker) and torch.cuda.is_available():
            del workers
            torch.cuda.empty_cache()
        return True

    def _running(self) -> ScoringWorker | ReplicaPool:
        if self._workers is None:
            raise ModelError(
                "the environment was shut down", got="a step after shutdown()", fix="make a new RewardModelEnvironment"
            )
        return self._workers

    def _here(self, what: str) -> ScoringWorker:
        workers = self._running()
        if isinstance(workers, ScoringWorker):
            return workers
        raise ConfigError(
            f"{what} needs the model in this process",
            got="a model in Ray workers",
            need="one replica, without .remote",
            fix='RewardModelEnvironment(env_config, workers="here")',
        )

    def _report_failures(self, rewards: Sequence[Reward]) -> None:
        failed = [i for i, reward in enumerate(rewards) if reward.value is None]
        if not failed:
            return
        first = "; ".join(f"sample {i}: {rewards[i].error}" for i in failed[:3])
        if self.config.on_failure == "raise":
            raise ModelError(
                f"{len(failed)} of {len(rewards)} samples have no reward",
                field="on_failure",
                got=first,
                need="a reward for each sample, as on_failure: raise asks",
                fix="mend what is named, or set on_failure=mask to take such samples out of the loss",
            )
        logger.warning("%d of %d samples have no reward: %s", len(failed), len(rewards), first)


def _checked(
    env_config: Mapping[str, Any] | RewardModelEnvironmentConfig, workers: Workers = "auto", where: str = _WHERE
) -> RewardModelEnvironmentConfig:
    if workers not in ("auto", "here", "ray"):
        raise ConfigError("there are no such workers", field="workers", got=workers, need="auto, here or ray")
    if isinstance(env_config, RewardModelEnvironmentConfig):
        return env_config
    return load_section(RewardModelEnvironmentConfig, env_config, where=where)


def _may_be_running(config: RewardModelEnvironmentConfig) -> bool:
    """Whether there are running statistics; also where the contract that would say so cannot be read here."""
    shaping = config.reward_shaping
    if shaping == "contract":
        try:
            contract = read_contract(config.model_names[0])
        except (TreewardError, OSError):
            return True  # the actor, on another machine, may well be able to
        shaping = contract.reward_shaping if contract else None
    return isinstance(shaping, RewardShapingConfig) and shaping.running


def _needs_ray(config: RewardModelEnvironmentConfig) -> bool:
    if config.num_workers > 1:
        return True
    if config.resources.gpus_per_node == 0 or torch.cuda.is_available():
        return False
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        return False
    # In an actor without a GPU of its own torch sees none, though the machine may have some.
    inside = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return inside and ray.cluster_resources().get("GPU", 0) > 0


def _worker_here(config: RewardModelEnvironmentConfig, where: str) -> ScoringWorker:
    if config.num_workers > 1:
        raise ConfigError(
            "several replicas do not run in one process",
            where=where,
            field="num_replicas",
            got=f"{config.num_workers} replicas, workers='here'",
            need="one replica",
            fix="leave workers out, and the replicas are Ray actors",
        )
    device = "cuda" if config.resources.gpus_per_node > 0 and torch.cuda.is_available() else "cpu"
    if config.resources.gpus_per_node > 0 and device == "cpu":
        logger.info("There is no GPU here: the reward model runs on the CPU.")
    if config.dtensor_cfg.cpu_offload and device == "cpu":
        logger.info("cpu_offload has no effect: the reward model runs on the CPU anyway.")
    if config.worker_timeout_seconds is not None:
        logger.info("worker_timeout_seconds has no effect: the model runs in this process, not in a worker.")
    worker = ScoringWorker(config, device)
    worker.load()
    return worker


def _make_shaper(config: RewardModelEnvironmentConfig) -> Shaper | None:
    return load_shaper(
        config.reward_shaping,
        config.model_names[0],
        is_ensemble=config.ensemble is not None,
        tokenizer=config.tokenizer.name,
        trust_remote_code=config.trust_remote_code,
    )


def _components(score: Score) -> dict[str, float]:
    parts = {f"member_{i}": value for i, value in enumerate(score.members)}
    heads = score.heads if len(score.heads) > 1 else ()
    return parts | {f"head_{i}": value for i, value in enumerate(heads)}
