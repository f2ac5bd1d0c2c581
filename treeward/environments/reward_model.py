"""`RewardModelEnvironment`: a reward model as the environment of an RL loop, in this process or in Ray actors.

    env = RewardModelEnvironment({"model_name": "results/rm/final", "batch_size": 32})
    env.step(message_logs, env_infos).rewards                                # float32 (B,)

    env = RewardModelEnvironment.remote(env_config)                          # the same, as a Ray actor
    ray.get(env.step.remote(message_logs, env_infos)).rewards

`env_config` is the section `env.reward_model` of an RL configuration: `RewardModelEnvironmentConfig`. Conversations are
rendered and read as in training, and a common prompt is computed once. Neither the number of replicas nor the other
conversations of a batch change a reward.

If `model_name` is the address of a `treeward serve`, the server scores (`RewardServer`). Several replicas are processes
of Ray Serve (`ReplicaPool`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from treeward.client.rewards import RewardClient
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.interface import (
    WHERE,
    AnyInfos,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Logs,
    Reward,
    Sample,
    conversation_of,
    plain,
)
from treeward.environments.scoring_worker import ScoringWorker
from treeward.errors import ConfigError, ModelError
from treeward.http import RewardServerError
from treeward.model.pretrained import load_tokenizer
from treeward.model.reward_model import RewardModel
from treeward.openai_client import key_from
from treeward.scoring.rewarding import Rewarder, load_shaper
from treeward.scoring.score import Conversation, Score
from treeward.scoring.shaping import Shaper

if TYPE_CHECKING:
    from treeward.environments.replicas import ReplicaPool

Workers = Literal["auto", "here", "ray"]


class RewardModelEnvironment(ConfiguredEnvironment[RewardModelEnvironmentConfig]):
    """Rewards conversations by a reward model.

    `workers`: "here" runs the model in this process, "ray" in Ray actors; "auto" is "here" for one replica, unless this
    process is a Ray actor without a GPU and the model needs one. `client`: of the server, instead of one by the
    configuration. Raises `ConfigError` for a faulty configuration or too few resources, `ModelError` for a model that
    cannot be loaded, `RewardServerError` for a server that does not respond.
    """

    name = "reward_model_env"
    section = RewardModelEnvironmentConfig

    def __init__(
        self,
        env_config: Mapping[str, Any] | RewardModelEnvironmentConfig,
        *,
        workers: Workers = "auto",
        client: RewardClient | None = None,
    ) -> None:
        super().__init__(env_config)
        self._lock = threading.Lock()  # steps may come from several threads; the model takes one at a time
        self._rewarder = Rewarder(lambda conversations, _: self._running().score(conversations), _shaper(self.config))
        self._workers: ScoringWorker | ReplicaPool | RewardServer | None
        if self.config.url is not None:
            self._workers = RewardServer.connect(self.config) if client is None else RewardServer(client)
        elif workers == "ray" or (workers == "auto" and _needs_ray(self.config)):
            self._workers = _replicas(self.config)
        else:
            self._workers = _worker_here(self.config)

    @classmethod
    def check_remote(cls, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = super().check_remote(*args, **kwargs)
        return args, {"workers": "ray"} | kwargs

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        with self._lock:
            rewards = self._shaped(conversations, env_infos)
        rewards = [replace(reward, components={**reward.components, **reward.score.parts}) for reward in rewards]
        self._refuse_failures([None if reward.value is not None else str(reward.error) for reward in rewards])
        return rewards

    def _shaped(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        workers = self._running()
        if isinstance(workers, RewardServer) and workers.shaped:
            return workers.rewards(conversations)
        key = self._rewarder.reference_key
        references = None if key is None else [plain(info.get(key)) for info in env_infos]
        return self._rewarder.rewards(conversations, references)

    def _samples(self, message_logs: Logs, env_infos: AnyInfos) -> list[Sample]:
        samples = super()._samples(message_logs, env_infos)
        self._refuse_failures([sample.error for sample in samples])
        return samples

    def _refuse_failures(self, errors: Sequence[str | None]) -> None:
        """With `on_failure: raise`, raise `ModelError` if a sample has an error."""
        failed = [f"sample {i}: {error}" for i, error in enumerate(errors) if error is not None]
        if failed and self.config.on_failure == "raise":
            raise ModelError(
                f"{len(failed)} of {len(errors)} samples have no reward",
                field="on_failure",
                got="; ".join(failed[:3]),
                fix="correct these samples, or set on_failure=mask to take such samples out of the loss",
            )

    def preprocess_data(self, message_logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Tensor]:
        """The model's input: `{"input_ids": int64 (B, L), "input_lengths": int64 (B,)}`, right-padded.

        Raises `DataError` for a conversation that has no completion, cannot be rendered or is too long, and
        `ConfigError` if the model is not in this process.
        """
        workers = self._running()
        preparing = self._here("preprocess_data") if isinstance(workers, RewardServer) else workers
        return preparing.preprocess([conversation_of(log) for log in message_logs])

    @property
    def reward_model_policy(self) -> RewardModel:
        """The model, if one runs in this process: its `score(preprocess_data(logs))["scores"]` are unshaped scores."""
        members = self._here("reward_model_policy").scorer.members
        if len(members) > 1:
            raise ConfigError("an ensemble has no one model", field="model_name", got=list(self.config.models))
        return members[0].model

    def shutdown(self) -> bool:
        """Free the model and end the workers. Safe to repeat; a later step is an error."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.shutdown()
        return True

    def _running(self) -> ScoringWorker | ReplicaPool | RewardServer:
        if self._workers is None:
            raise ModelError("the environment was shut down", fix="make a new RewardModelEnvironment")
        return self._workers

    def _here(self, what: str) -> ScoringWorker:
        workers = self._running()
        if isinstance(workers, ScoringWorker):
            return workers
        raise ConfigError(
            f"{what} needs the model in this process",
            got="a model in other processes, or at a server",
            fix='the folder of the model, one replica, workers="here"',
        )


def _shaper(config: RewardModelEnvironmentConfig) -> Shaper | None:
    if config.url is None or config.shaping is None:
        return load_shaper(config)
    # The contract is at the server; a tokenizer name that repeats the address means none.
    name = config.tokenizer.name
    has_tokenizer = name is not None and name not in config.models
    tokenizer = load_tokenizer(str(name), trust_remote_code=config.trust_remote_code) if has_tokenizer else None
    assert config.shaping != "contract", "the section refuses it"
    return Shaper(config.shaping, tokenizer=tokenizer)


def _needs_ray(config: RewardModelEnvironmentConfig) -> bool:
    if config.needs_ray:
        return True
    if config.resources.gpus_per_node == 0 or torch.cuda.is_available():
        return False
    try:
        import ray
    except ImportError:
        return False
    # In an actor without a GPU torch sees none, though the machine may have some.
    inside = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return inside and ray.cluster_resources().get("GPU", 0) > 0


def _replicas(config: RewardModelEnvironmentConfig) -> ReplicaPool:
    try:
        from treeward.environments.replicas import ReplicaPool
    except ImportError as error:
        fix = "pip install 'treeward[ray,serve]', or use one replica here"
        raise ConfigError("Ray Serve is not installed", where=WHERE, got=str(error), fix=fix) from error
    return ReplicaPool(config)


def _worker_here(config: RewardModelEnvironmentConfig) -> ScoringWorker:
    if config.needs_ray:
        size = config.dtensor_cfg.tensor_parallel_size
        got = f"{config.num_workers} replicas of {size} processes each, workers='here'"
        fields = "num_replicas dtensor_cfg.tensor_parallel_size"
        raise ConfigError("these do not run in one process", where=WHERE, field=fields, got=got)
    on_gpu = config.resources.gpus_per_node > 0 and torch.cuda.is_available()
    worker = ScoringWorker(config, "cuda" if on_gpu else "cpu")
    worker.load()
    return worker


class RewardServer:
    """The model of a client. `shaped`: its rewards have the server's shaping.

    Raises `RewardServerError` for a server that does not respond, and `ConfigError` for one without the model.
    """

    def __init__(self, client: RewardClient, *, shaped: bool = True) -> None:
        self.client, self.shaped = client, shaped
        self.model = self._described()

    @classmethod
    def connect(cls, config: RewardModelEnvironmentConfig) -> RewardServer:
        """The server at `config.url`. Raises `ConfigError` if the environment has no token."""
        token = key_from(config.token_env, where=WHERE, field="token_env")
        limits = {"max_retries": config.max_retries, "timeout_seconds": config.worker_timeout_seconds or 600.0}
        client = RewardClient(str(config.url), token=token, model=config.served_model, **limits)  # type: ignore[arg-type]
        return cls(client, shaped=config.shaping is None)

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a failed one is None with the reason in `Score.error`."""
        return [reward.score for reward in self.rewards(conversations)]

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def rewards(self, conversations: Sequence[Conversation]) -> list[Reward]:
        """Rewards in order; None with the reason."""
        try:
            rewards = self.client.detailed_rewards(conversations, shaped=self.shaped, on_error="mask")
            description = self._described()  # afterwards, to describe the model that has scored
        except RewardServerError as error:
            if error.status in (401, 403, 404):  # it would refuse every later request too
                raise ModelError(error.summary, where=error.where, got=error.got, fix=error.fix) from error
            reason = f"{error.where}: {error.summary} ({error.got})"
            return [Reward(None, Score(None, error=reason), error=reason) for _ in conversations]
        if description != self.model:
            summary = "the server's model, or its settings, have changed"
            raise ModelError(summary, where=self.client.url, got=description, need=str(self.model))
        names = tuple(description["heads"])
        return [replace(reward, score=replace(reward.score, head_names=names)) for reward in rewards]

    def _described(self) -> dict[str, Any]:
        """The model's entry of /v1/models, without keys that rewards do not depend on."""
        name, models = self.client.model, self.client.models()
        entry = next((model for model in models if name in (None, model["id"])), {})
        if "identity" not in entry:  # other servers list models too
            got, need = ", ".join(model["id"] for model in models), f"a `treeward serve` with {name or 'a model'}"
            summary, fix = "the server does not have this reward model", "name one of its models as served_model"
            raise ConfigError(summary, where=self.client.url, got=f"models {got}", need=need, fix=fix)
        return {key: entry[key] for key in ("id", "identity", "heads")}
