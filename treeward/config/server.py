"""`ServerConfig`: what `treeward serve` answers for, where it listens, and how much it accepts.

    models:
      - model: results/rm/final
      - {name: careful, models: [results/a/final, results/b/final], ensemble: {method: worst}}
    port: 8000
    token_env: TREEWARD_TOKEN        # the environment variable that holds the bearer token

`treeward serve MODEL --port 8000` is the same for one model.
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic import model_validator as validator

from treeward.config.base import Strict
from treeward.config.ensemble import EnsembleConfig
from treeward.config.reward_shaping import ShapingOrContract
from treeward.errors import ConfigError

__all__ = ["ServedModelConfig", "ServerConfig", "is_loopback"]

_Models = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda models: (models,) if isinstance(models, str) else models),
    Field(min_length=1),
]


_Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda names: (names,) if isinstance(names, str) else names)
]  # fmt: skip


class ServedModelConfig(Strict):
    """A reward model, or several as one, under a name."""

    model: str | None = None
    """Folder or hub name of a reward model. Give this, or `models`."""
    models: _Models | None = None
    """Folders or hub names of the members of an ensemble; it needs `ensemble`."""
    name: str | None = None
    """What requests call it. None: the folder's name with that of the folder above where it says nothing of the model
    (`results/rm/final` is `rm`), or the hub name."""
    ensemble: EnsembleConfig | None = None
    """How the members, or the heads of one model, become one score."""
    shaping: ShapingOrContract | None = None
    """How scores become rewards; `contract` is what the model's scoring contract says. None: scores as they are."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the backbone's weights; the head is float32."""
    device: str | None = None
    """cpu, cuda, cuda:1, ... None: a GPU where there is one."""
    max_length: PositiveInt | None = None
    """Most tokens of a conversation. None: as in training."""
    truncation: Literal["drop", "truncate_left", "error"] | None = None
    """What becomes of longer ones. None: as in training."""
    trust_remote_code: bool = False
    """Run Python code that the model brings."""
    check_contract: bool = True
    """Refuse to serve a model that does not give its contract's golden conversations their tokens and scores."""
    reward_class: str | None = None
    """A reward of your own, as `my_module:MyReward`: a class that is made with `model` and has `score(prompt,
    response)`, or `score_batch(prompts, responses)`. None: `model` is a reward model."""

    @property
    def members(self) -> tuple[str, ...]:
        """The models that are loaded."""
        return self.models if self.models is not None else (self.model or "",)

    @property
    def served_name(self) -> str:
        """What requests call it."""
        if self.name is not None:
            return self.name
        names = [_name_of(member) for member in self.members]
        if self.ensemble is None:
            return names[0]
        return f"{self.ensemble.method}-of-{'-'.join(names)}"

    @validator(mode="after")
    def _says_what_is_served(self) -> ServedModelConfig:
        if (self.model is None) == (self.models is None):
            raise ConfigError(
                "a served model is either one model or several",
                field="model",
                got="neither model nor models" if self.model is None else "both model and models",
                need="model: FOLDER, or models: [FOLDER, FOLDER] with ensemble",
            )
        if self.reward_class is not None and (self.models is not None or self.ensemble is not None):
            raise ConfigError(
                "a reward class is one model",
                field="reward_class",
                got=f"{self.reward_class} with models or an ensemble",
                need="model: PATH, which the class is made with",
            )
        if self.models is not None and self.ensemble is None:
            raise ConfigError(
                "nothing says how the scores of several models become one",
                field="ensemble",
                got="null",
                need="an ensemble section, as {method: mean}",
            )
        return self


class ServerConfig(Strict):
    """What `treeward serve` reads."""

    models: tuple[ServedModelConfig, ...] = Field(min_length=1)
    """The models; the first answers requests that name none."""
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 is every network."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """The port to listen on; 0 takes a free one and says which."""
    batch_tokens: PositiveInt = 4096
    """Most tokens computed in one forward pass, counted after sharing."""
    prefix_cache_bytes: NonNegativeInt = 2**28
    """Memory for the keys and values of prompts that were scored before, of each model; 0 keeps none."""
    max_queued: PositiveInt = 20_000
    """Most conversations that wait to be scored. Beyond it requests are refused with 429 and a time to come back."""
    max_queued_bytes: PositiveInt = 2**29
    """Most bytes of request bodies that are held at one time, until they are answered; beyond it 429 as well."""
    max_body_bytes: PositiveInt = 2**25
    """The largest request body; a larger one gets 413 before it is read."""
    max_conversations: PositiveInt = 4096
    """Most conversations in one request; more get 413."""
    max_conversation_characters: PositiveInt = 1_000_000
    """Most characters of one conversation, or token ids where a client sends these; each message counts as 64 more, and
    a part of one as 16. A longer conversation is refused before tokens are made of it, as one with too many tokens is.
    """
    deadline_seconds: PositiveFloat = 120.0
    """The time in which a request is answered, from its first byte; beyond it 504, and what it asked for is not
    scored any more. A request may ask for less in the header X-Deadline-Seconds."""
    body_seconds: PositiveFloat = 30.0
    """The time that a client may take to send its headers, and then its body; beyond it 408."""
    shutdown_seconds: PositiveFloat = 60.0
    """On SIGTERM or SIGINT: how long to go on with what was accepted, while new requests get 503."""
    token_env: str | None = None
    """The environment variable with the bearer token that requests must have. None: no token is asked for."""
    tls_certificate: str | None = None
    """PEM file with the certificate chain; with `tls_key` the server speaks HTTPS."""
    tls_key: str | None = None
    """PEM file with the private key."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server, as https://example.org; none by default."""
    allowed_hosts: _Names | None = None
    """Names that requests may have in their header Host, as rm.example.org, without a port; others get 421. Loopback's
    own names are always allowed. None: no others where `host` is a loopback address, so that a page of another site
    cannot reach the server by a name that was made to mean this machine, and any name elsewhere. "*" is any."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one JSON object a line, with the id of the request."""
    access_log: bool = True
    """Log a line for each request."""
    playground: bool = True
    """Serve a page at / where a person can try the models."""

    @property
    def hosts_that_may_be_named(self) -> tuple[str, ...] | None:
        """The names besides loopback's that the header Host may have; None where it may have any."""
        if self.allowed_hosts is None:
            return () if is_loopback(self.host) else None
        return None if "*" in self.allowed_hosts else self.allowed_hosts

    @validator(mode="after")
    def _hosts_are_names(self) -> ServerConfig:
        for name in self.allowed_hosts or ():
            if name != "*" and not re.fullmatch(r"[a-z0-9_.-]+|\[[0-9a-f:.]+\]", name):
                raise ConfigError(
                    "this is no name of a server",
                    field="allowed_hosts",
                    got=repr(name),
                    need="names in lower case without a scheme or port, as rm.example.org or 10.0.0.7, or *",
                )
        return self

    @validator(mode="after")
    def _names_differ(self) -> ServerConfig:
        names = [model.served_name for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(
                "two served models have one name",
                field="models",
                got=", ".join(twice),
                need="a name of its own for each",
                fix="give models[i].name",
            )
        return self

    @validator(mode="after")
    def _tls_is_whole(self) -> ServerConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "tls_certificate and tls_key belong together",
                field="tls_key" if self.tls_key is None else "tls_certificate",
                got="null",
                need="both of them, or neither",
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether a name or address, or one in brackets, means this machine alone."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _name_of(model: str) -> str:
    """`results/rm/final` is rm; `org/model` is org/model."""
    if not Path(model).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return model
    parts = [part for part in Path(model).resolve().parts if part != "/"]
    while len(parts) > 1 and parts[-1] in ("final", "model"):
        parts.pop()
    return parts[-1] if parts else "model"
