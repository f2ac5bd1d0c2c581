"""`ServedModel`: the description of a served reward model, without its weights: with replicas it comes from another
process.

    model, scorer = load_served(ServedModelConfig(models=("results/rm/final",)), server_config)
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from treeward.config.server import ServedModelConfig, ServerConfig, model_name
from treeward.data.rendering import Renderer
from treeward.model.contract import read_contract
from treeward.model.pretrained import check_device
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.identity import scorer_identity
from treeward.scoring.scorer import PreparedScorer, Scorer
from treeward.scoring.shaping import Shaper, load_shaper
from treeward.serving.rendered_text import Ending


@dataclass(frozen=True)
class ServedModel:
    """A reward model, or several as one, under its name in requests.

    `members`: their folders or hub names. `scores`: what scores depend on. `contract_sha256`: hash of the scoring
    contract, or of all members' contracts; None if one is missing or unchecked. `temperature`: scores divided by it are
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
        """The model of a section with this `scorer`. Raises `ConfigError` for shaping by missing constants."""
        contracts = [member.contract for member in scorer.members]
        # An unchecked model may break its contract; other head weights give other scores.
        is_kept = section.check_contract and section.head_weights is None
        hashes = [contract.scores_sha256 for contract in contracts if contract is not None and is_kept]
        calibration = contracts[0].calibration if hashes and isinstance(scorer, Scorer) and contracts[0] else None
        return cls(
            name=section.served_name,
            members=section.models,
            renderer=scorer.renderer,
            scores=scorer_identity(scorer, section.models[0]),
            contract_sha256="+".join(hashes) if hashes and len(hashes) == len(contracts) else None,
            heads=scorer.members[0].head_names if len(scorer.members) == 1 else (),
            temperature=calibration.temperature.value if calibration and calibration.temperature else None,
            shaper=load_shaper(section),
        )

    @cached_property
    def ending(self) -> Ending:
        """How rendered text of this model ends."""
        return Ending.of(self.renderer)

    @cached_property
    def identity(self) -> str:
        """Hash of everything that rewards depend on."""
        parts = [self.scores, *(() if self.shaper is None else (self.shaper.config, self.shaper.calibration))]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    @property
    def _shown_members(self) -> list[str]:
        """The members for clients: of a path, which says where this machine keeps its files, the model's name."""
        return [model_name(member) if os.path.isabs(member) else member for member in self.members]

    def described(self, created: int) -> dict[str, Any]:
        """The model as /v1/models lists it. `created`: seconds of the epoch."""
        return {
            "id": self.name,
            "object": "model",
            "created": created,
            "owned_by": "treeward",
            "root": self._shown_members[0],
            "max_model_len": self.renderer.max_length,
            "contract": self.contract_sha256,
            "members": self._shown_members,
            "heads": list(self.heads),
            "temperature": self.temperature,
            "shaped": self.shaper is not None,
            "identity": self.identity,
        }


def load_served(section: ServedModelConfig, server: ServerConfig) -> tuple[ServedModel, PreparedScorer]:
    """The section's models, loaded. Raises `ModelError` for a model that breaks its scoring contract, and `ConfigError`
    for a missing device.
    """
    check_device(section.device, where=section.served_name, field="device")
    contracts = [contract for contract in map(read_contract, section.models) if contract is not None]
    is_known = section.max_length or any(c.rendering.max_length or c.rendering.trained_length for c in contracts)
    config = section if is_known else section.model_copy(update={"max_length": section.default_max_length})
    capacity = {"batch_tokens": server.batch_tokens, "prefix_cache_bytes": server.prefix_cache_bytes}
    scorer = load_scorer(config, device=section.device, **capacity)
    return ServedModel.of(section, scorer), scorer
