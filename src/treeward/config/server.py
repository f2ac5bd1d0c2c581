"""`ServerConfig`: the models or the judge of `treeward serve`, the address, and the limits on
requests.

models:
  - model: results/rm/final
  - {name: careful, models: [results/a/final, results/b/final], ensemble: worst}
port: 8000
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import Strict
from treeward.config.scoring import ScoringConfig
from treeward.config.served_judge import ServedJudgeConfig
from treeward.errors import ConfigError


class ServedModelConfig(ScoringConfig):
    """A reward model, or several as one, under a name."""

    name: str | None = None
    """Name of the model in requests. None: the hub name, or that of the folder (`results/rm/final`
    is `rm`)."""
    device: str = "auto"
    """`auto` (a GPU if there is one, else the CPU), cpu, cuda, cuda:1, ..."""
    default_max_length: PositiveInt | None = None
    """`max_length` of a model whose scoring contract does not say. None: the model's positions."""

    @property
    def served_name(self) -> str:
        """Name of the model in requests."""
        if self.name is not None:
            return self.name
        names = [model_name(model) for model in self.models]
        if self.ensemble is None:
            return names[0]
        return f"{self.ensemble.method}-of-{'-'.join(names)}"


class ServerConfig(Strict):
    """What `treeward serve` reads."""

    models: tuple[ServedModelConfig, ...] = ()
    """The models; the first one serves requests without a model name. At least one, unless there is
    a judge."""
    judge: ServedJudgeConfig | None = None
    """A judge, which compares the completions of a prompt. `/compare` and NeMo Gym's `/verify` are
    its routes then. None: no judge."""
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for every network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on; 0 for a free one, which the log names."""
    running: bool = False
    """Normalise the rewards of NeMo Gym's `/verify`, and no others, by the mean and deviation of
    those so far."""
    replicas: PositiveInt = 1
    """Processes that each hold every model, in Ray Serve behind one address. 1: this process,
    without Ray."""
    tensor_parallel_size: PositiveInt = 1
    """Processes of one node that each replica of a model is divided over, each with a GPU where
    there are any: for one model that does not fit into a GPU. More than 1 needs Ray Serve, and has
    no cache of prompts."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray's options of each process, as {num_gpus: 0.5}. By default a GPU, or an equal part of the
    CPUs."""
    batch_tokens: PositiveInt = 4096
    """Most tokens computed in one forward pass, counted after sharing."""
    batch_size: PositiveInt | None = None
    """Most conversations in one forward pass. None: only `batch_tokens` limits it."""
    prefix_cache_bytes: NonNegativeInt = 2**28
    """Memory of each model for the keys and values of prompts that were scored before; 0 disables
    the cache."""
    max_queued: PositiveInt = 20_000
    """Most conversations in the queue, and comparisons in a request. Beyond it requests get 429
    with a time for a retry; one with more gets 413."""
    max_body_bytes: PositiveInt = 2**25
    """The largest request body; a larger one gets 413 as soon as its bytes show it."""
    max_body_items: PositiveInt = 500_000
    """Most JSON values of a body, token ids and nested ones included; a body with more gets 413
    before it is parsed."""
    deadline_seconds: PositiveFloat = 120.0
    """Time limit of a request; beyond it 504."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of requests. None: requests need no
    token."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside localhost and addresses, by which clients may ask a server on loopback without
    a token. Other names get 421: a web page could resolve its own name to this machine, and read
    scores in a browser."""
    access_log: bool = True
    """Log a line for each request, and the reason of each that is refused, which may quote up to 500
    characters of the request."""

    @property
    def needs_ray(self) -> bool:
        """Whether the models are in processes of Ray Serve."""
        return self.replicas > 1 or self.tensor_parallel_size > 1

    def check(self) -> None:
        if not self.models and self.judge is None:
            raise ConfigError(
                "there is nothing to serve",
                field="models",
                got="no models and no judge",
                need="a reward model, or a judge",
            )
        if self.judge is not None and self.needs_ray:
            need = "a server of one process, which keeps the rollouts that wait for each other"
            raise self.error("replicas tensor_parallel_size", need, "serve the judge by itself")
        if self.judge is not None and self.running:
            raise self.error("running", "false with a judge, whose rewards are of a group")
        if self.tensor_parallel_size > 1 and len(self.models) > 1:
            raise self.error("tensor_parallel_size models", "one model, which is divided")
        names = [model.served_name for model in self.models]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(
                "two served models have one name",
                field="models",
                got=", ".join(repeated),
                need="models[i].name, another for each",
            )


def model_name(model: str) -> str:
    """The name of a model by its folder or hub name: `results/rm/final` is rm; `org/model` is
    org/model."""
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    parts = [part for part in Path(os.path.abspath(model)).parts if part != "/"]
    # The folders of an export within a run's, which say nothing of the model.
    while len(parts) > 1 and parts[-1] in ("final", "model"):
        parts.pop()
    return parts[-1] if parts else "model"
