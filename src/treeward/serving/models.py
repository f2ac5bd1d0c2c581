"""`ServedModel`: the description of a served reward model, without its weights: with replicas it
comes from another process.

    model, scorer = load_served(ServedModelConfig(models=("results/rm/final",)), server_config)
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from treeward.config.server import ServedModelConfig, ServerConfig, model_name
from treeward.data.rendering import Renderer
from treeward.model.contract import read_contract
from treeward.model.pretrained import check_device, choose_device
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.identity import scorer_identity
from treeward.scoring.scorer import PreparedScorer, Scorer
from treeward.scoring.shaping import Shaper, load_shaper
from treeward.serving.rendered_text import Ending


@dataclass(frozen=True)
class ServedModel:
    """A reward model, or several as one, under its name in requests.

    `members`: their folders or hub names. `scores`: what scores depend on. `contract_sha256`: hash
    of the scoring contract, or of all members' contracts; None if one is missing or unchecked, and
    where the section changes what scores are made of. `temperature`: scores divided by it are
    log-odds.
    """

    name: str
    renderer: Renderer
    members: tuple[str, ...]
    scores: dict[str, Any]
    contract_sha256: str | None
    heads: tuple[str, ...]
    temperature: float | None
    shaper: Shaper | None

    @classmethod
    def of(cls, section: ServedModelConfig, scorer: PreparedScorer) -> ServedModel:
        """The model of a section with this `scorer`. Raises `ConfigError` for shaping by missing
        constants.
        """
        # Members that were never signed have none.
        contracts = [member.contract for member in scorer.members if member.contract is not None]
        # An unchecked model may break its contract. Other head weights, and conversations that are
        # rendered in another way, have other scores.
        is_rendered_alike = not section.tokenizer.rendering and _has_own_tokenizer(section)
        has_own_heads = section.head_weights is not None
        if not section.check_contract or has_own_heads or not is_rendered_alike:
            contracts = []
        contract_sha256 = None
        # A hash of some members would say nothing about the score, which depends on all.
        if contracts and len(contracts) == len(scorer.members):
            contract_sha256 = "+".join(contract.scores_sha256 for contract in contracts)
        heads: tuple[str, ...] = ()
        if len(scorer.members) == 1:
            heads = scorer.members[0].head_names
        temperature = None
        # An ensemble's score is not that of a member, so a member's temperature does not fit it.
        if contracts and isinstance(scorer, Scorer):
            calibration = contracts[0].calibration
            if calibration is not None and calibration.temperature is not None:
                temperature = calibration.temperature.value
        return cls(
            name=section.served_name,
            members=section.models,
            renderer=scorer.renderer,
            scores=scorer_identity(scorer, section.models[0]),
            contract_sha256=contract_sha256,
            heads=heads,
            temperature=temperature,
            shaper=load_shaper(section),
        )

    @cached_property
    def ending(self) -> Ending:
        """How rendered text of this model ends."""
        return Ending.of(self.renderer)

    @cached_property
    def identity(self) -> str:
        """Hash of everything that rewards depend on."""
        parts: list[Any] = [self.scores]
        if self.shaper is not None:
            parts += [self.shaper.config, self.shaper.calibration]
        # `default=str`: the text of a section has every key.
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    @property
    def _shown_members(self) -> list[str]:
        """The members for clients. A path would say where this machine keeps its files, so it is
        shown as the model's name.
        """
        names = []
        for member in self.members:
            name = model_name(member) if os.path.isabs(member) else member
            names.append(name)
        return names

    def described(self, created: int) -> dict[str, Any]:
        """The model as /v1/models lists it. `created`: seconds of the epoch."""
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "treeward",
            # vLLM's name for where a model was loaded from.
            "root": self._shown_members[0],
            "max_model_len": self.renderer.max_length,
            "contract": self.contract_sha256,
            "members": self._shown_members,
            "heads": list(self.heads),
            "temperature": self.temperature,
            "shaped": self.shaper is not None,
            "identity": self.identity,
        }


def _has_own_tokenizer(section: ServedModelConfig) -> bool:
    name = section.tokenizer.name
    # As paths: replicas have the models' whole ones, beside a tokenizer as it was given.
    own_paths = [Path(model).expanduser().resolve() for model in section.models]
    return name is None or Path(name).expanduser().resolve() in own_paths


def load_served(
    section: ServedModelConfig,
    server: ServerConfig,
) -> tuple[ServedModel, PreparedScorer]:
    """The section's models, loaded. Raises `ModelError` for a model that breaks its scoring
    contract, and `ConfigError` for a missing device.
    """
    check_device(section.device, where=section.served_name, field="device")
    has_limit = section.max_length is not None
    for model in section.models:
        contract = read_contract(model)
        if contract is not None:
            rendering = contract.rendering
            has_limit = has_limit or bool(rendering.max_length or rendering.trained_length)
    # Where no contract says how long conversations may be, the section's default does.
    if not has_limit:
        section = section.model_copy(update={"max_length": section.default_max_length})
    limits = {"batch_tokens": server.batch_tokens, "max_sequences": server.batch_size}
    if server.tensor_parallel_size > 1:
        # It needs Ray, which most servers do without.
        from treeward.scoring.divided import DividedScorer  # noqa: PLC0415

        device = choose_device(section.device).type
        size = server.tensor_parallel_size
        divided = DividedScorer(section, size, device=device, **limits)
        return ServedModel.of(section, divided.own_scorer), divided
    scorer = load_scorer(
        section,
        device=section.device,
        prefix_cache_bytes=server.prefix_cache_bytes,
        **limits,
    )
    return ServedModel.of(section, scorer), scorer
