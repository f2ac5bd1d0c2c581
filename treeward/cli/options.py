"""Options that several verbs have, and the reward models that they name.

def run(models: Models, device: Device = None, dtype: Dtype = "float32", ...) -> int:
    options = loading_options(device, dtype, trust_remote_code)
    scorer, shaper = RewardModels(tuple(models), ensemble, shaping).load(options)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treeward.errors import ConfigError

if TYPE_CHECKING:
    from treeward.config.ensemble import EnsembleConfig
    from treeward.config.reward_shaping import RewardShapingConfig
    from treeward.scoring.score import ConversationScorer
    from treeward.scoring.shaping import Shaper

__all__ = [
    "BatchTokens",
    "ConfigFile",
    "Device",
    "Dtype",
    "Ensemble",
    "MaxLength",
    "Overrides",
    "RewardModels",
    "Shaping",
    "TrustRemoteCode",
    "Truncation",
    "Unchecked",
    "ensemble_section",
    "fixed_shaping",
    "loading_options",
    "parse_yaml",
    "scoring_options",
    "shaping_section",
    "write_table",
]

ConfigFile = Annotated[str, typer.Option("--config", metavar="FILE", help="The YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="Override keys of the file; +key adds one, ~key removes one."),
]

Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU where there is one.")]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="Number format of the backbone's weights.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model folder contains.")
]
BatchTokens = Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens in one forward pass.")]
MaxLength = Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest conversation, in tokens.")]
Truncation = Annotated[
    Literal["drop", "truncate_left", "error"] | None,
    typer.Option(help="Longer ones: no score, oldest context cut, or an error; default: as in training."),
]
Unchecked = Annotated[
    bool, typer.Option("--unchecked", help="Go on even if the model does not keep its scoring contract.")
]
Shaping = Annotated[
    str | None,
    typer.Option(metavar="YAML", help="A reward_shaping section, or `contract` for that of the model's contract."),
]
Ensemble = Annotated[
    str | None,
    typer.Option(metavar="YAML", help="Several models as one: mean, worst, uncertainty, or an ensemble section."),
]


def loading_options(device: str | None, dtype: str, trust_remote_code: bool) -> dict[str, Any]:
    """How `Scorer.load` and `verify` load a model. Raises `ConfigError` for a device that is not there."""
    import torch  # seconds

    from treeward.model.pretrained import DTYPES

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigError(
            "the device cannot be used",
            where="--device",
            got=f"{device}: {str(error).splitlines()[0]}",
            need="cpu, or a GPU that torch sees, as cuda or cuda:1",
        ) from error
    return {"device": device, "dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}


def scoring_options(
    batch_tokens: int | None, max_length: int | None, truncation: str | None, unchecked: bool
) -> dict[str, Any]:
    """The options of `Scorer.load` that were given."""
    given = {"batch_tokens": batch_tokens, "max_length": max_length, "truncation": truncation}
    return {"check_contract": not unchecked} | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class RewardModels:
    """Reward models that score as one: a single one, or an ensemble; with or without a shaping of their scores.

    `where`: the option that asks for the shaping, for errors.
    """

    models: tuple[str, ...]
    ensemble: EnsembleConfig | None = None
    shaping: RewardShapingConfig | Literal["contract"] | None = None
    where: str = "--shaping"

    def load(self, options: Mapping[str, Any]) -> tuple[Any, Shaper | None]:
        """The scorer, and the `Shaper` of its scores (None without shaping). `options`: those of `Scorer.load`.

        Raises `ConfigError` for a shaping whose rewards depend on the order of the conversations.
        """
        from treeward.scoring.ensemble import EnsembleScorer
        from treeward.scoring.scorer import Scorer

        scorer: Scorer | EnsembleScorer
        if self.ensemble is not None:
            scorer = EnsembleScorer.load(self.models, config=self.ensemble, **options)
        else:
            scorer = Scorer.load(self.models[0], **options)
        return scorer, self.shaper(tokenizer=scorer.renderer.tokenizer)

    def shaper(self, **tokenizer: Any) -> Shaper | None:
        """The shaper alone, without the weights: its errors come before they are loaded.

        `tokenizer`: the arguments of that name, or `trust_remote_code`, of `load_shaper`.
        """
        from treeward.scoring.rewarding import check_fixed, load_shaper

        shaper = load_shaper(self.shaping, self.models[0], is_ensemble=self.ensemble is not None, **tokenizer)
        if shaper is not None:
            check_fixed(shaper.config, self.where)
        return shaper

    def check_alone(self, **tokenizer: Any) -> Shaper | None:
        """As `shaper`. Raises `ConfigError` for a shaping that compares with reference completions, too."""
        from treeward.scoring.rewarding import check_alone

        shaper = self.shaper(**tokenizer)
        if shaper is not None:
            check_alone(shaper.config, self.where)
        return shaper

    def load_rewards(self, options: Mapping[str, Any]) -> ConversationScorer:
        """The scorer, or, with shaping, one whose scores are the rewards. Raises as `check_alone`."""
        from treeward.scoring.rewarding import RewardScorer

        scorer, shaper = self.load(options)
        return scorer if shaper is None else RewardScorer(scorer, shaper, where=self.where)


def ensemble_section(given: Any, where: str = "--ensemble") -> EnsembleConfig:
    """An ensemble section: an option's text, or a value that was read from YAML; a name is a method."""
    from treeward.config.ensemble import EnsembleConfig
    from treeward.config.load import load_section

    value = parse_yaml(given, where) if isinstance(given, str) else given
    return load_section(EnsembleConfig, {"method": value} if isinstance(value, str) else value, where=where)


def shaping_section(given: Any, where: str = "--shaping") -> RewardShapingConfig:
    """A reward_shaping section: an option's text, or a value that was read from YAML."""
    from treeward.config.load import load_section
    from treeward.config.reward_shaping import RewardShapingConfig

    value = parse_yaml(given, where) if isinstance(given, str) else given
    if isinstance(value, str):
        raise ConfigError("this is no shaping", where=where, got=value, need="a section, as {reference: par}")
    return load_section(RewardShapingConfig, value, where=where)


def fixed_shaping(given: Any, where: str = "--shaping") -> RewardShapingConfig | Literal["contract"] | None:
    """A shaping by which a conversation has one reward wherever it stands: a section, "contract", or None.

    Raises `ConfigError` for one with running statistics.
    """
    if given is None or given == "contract":
        return given  # type: ignore[no-any-return]
    shaping = shaping_section(given, where)
    if shaping.running:  # asked here: the import takes seconds, and most shapings have nothing to refuse
        from treeward.scoring.rewarding import check_fixed

        check_fixed(shaping, where)
    return shaping


def parse_yaml(text: str, option: str) -> Any:
    """A mapping or a name that is given as an option."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            "the option cannot be read", where=option, got=text, need="YAML, as {key: value}, or a name"
        ) from error
    if not isinstance(value, str | dict):
        raise ConfigError("the option is no section", where=option, got=text, need="{key: value, ...}, or a name")
    return value


def write_table(rows: Any, columns: Any) -> None:
    """Write a results table to standard output, in ASCII where it cannot draw lines."""
    import sys

    from treeward.tables import results_table

    can_draw = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    sys.stdout.write(results_table(rows, columns, ascii_only=not can_draw) + "\n")
