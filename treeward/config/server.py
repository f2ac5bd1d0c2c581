"""`ServerConfig`: the models of `treeward serve`, the address, and the limits on requests.

models:
  - model: results/rm/final
  - {name: careful, models: [results/a/final, results/b/final], ensemble: {method: worst}}
port: 8000
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import Strict
from treeward.config.scoring import ScoringConfig
from treeward.errors import ConfigError

Devices = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: tuple(map(str.strip, value.split(","))) if isinstance(value, str) else value),
]


class ServedModelConfig(ScoringConfig):
    """A reward model, or several as one, under a name."""

    name: str | None = None
    """Name of the model in requests. None: the hub name, or that of the folder (`results/rm/final` is `rm`)."""
    device: Devices = ("auto",)
    """`auto` (a GPU if there is one, else the CPU), cpu, cuda, cuda:1, ...; each of several has a copy of the model."""
    default_max_length: PositiveInt | None = None
    """`max_length` of a model whose scoring contract does not say. None: the model's positions."""
    reward_class: str | None = None
    """A class of your own, as `my_module:MyReward`, made with the path of the model. None: it is a reward model."""

    @property
    def served_name(self) -> str:
        """Name of the model in requests."""
        if self.name is not None:
            return self.name
        names = [_name_of(model) for model in self.models]
        return names[0] if self.ensemble is None else f"{self.ensemble.method}-of-{'-'.join(names)}"

    def check(self) -> None:
        super().check()
        if self.reward_class is not None and self.ensemble is not None:
            raise self.error("reward_class ensemble", "one model, without an ensemble")
        if self.reward_class is not None and self.shaping == "contract":
            need = "a reward_shaping section: a reward class has no scoring contract"
            raise self.error("shaping reward_class", need)


class ServerConfig(Strict):
    """What `treeward serve` reads."""

    models: tuple[ServedModelConfig, ...] = Field(min_length=1)
    """The models; the first one serves requests without a model name."""
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for every network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on; 0 for a free one, which the log names."""
    running: bool = False
    """Normalise the rewards of NeMo Gym's `/verify`, and no others, by the mean and deviation of those so far."""
    replicas: PositiveInt = 1
    """Processes that each hold every model, in Ray Serve behind one address. 1: this process, without Ray."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Ray's options of each replica, as {num_gpus: 0.5}. By default a GPU, or an equal part of the CPUs."""
    batch_tokens: PositiveInt = 4096
    """Most tokens computed in one forward pass, counted after sharing."""
    prefix_cache_bytes: NonNegativeInt = 2**28
    """Memory of each model for the keys and values of prompts that were scored before; 0 disables the cache."""
    max_queued: PositiveInt = 20_000
    """Most conversations in the queue. Beyond it requests get 429 with a time for a retry."""
    max_body_bytes: PositiveInt = 2**25
    """The largest request body; a larger one gets 413 before it is read."""
    max_conversations: PositiveInt = 4096
    """Most conversations in one request; more get 413."""
    max_conversation_characters: PositiveInt = 1_000_000
    """Most characters (or token ids) of one conversation; a longer one is refused before it is tokenized."""
    deadline_seconds: PositiveFloat = 120.0
    """Time limit of a request, from its first byte; beyond it 504. A request may ask for less by X-Deadline-Seconds."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of requests. None: requests need no token."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one JSON object a line, with the id of the request."""
    access_log: bool = True
    """Log a line for each request."""

    def check(self) -> None:
        names = [model.served_name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            need = "models[i].name, another for each"
            raise ConfigError("two served models have one name", field="models", got=", ".join(twice), need=need)


def _name_of(model: str) -> str:
    """`results/rm/final` is rm; `org/model` is org/model."""
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    parts = [part for part in Path(model).resolve().parts if part != "/"]
    while len(parts) > 1 and parts[-1] in ("final", "model"):
        parts.pop()
    return parts[-1] if parts else "model"
