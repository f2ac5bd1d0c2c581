"""`treeward merge`: the weights of several reward models, averaged into one model folder.

examples:
  treeward merge results/a/final results/b/final --output results/merged
  treeward merge A B C --output merged --weights 0.5,0.25,0.25

Merge models of one initialisation that differ in data order, seed or learning rate.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from treeward.cli.options import TrustRemoteCode
from treeward.errors import ConfigError

logger = logging.getLogger(__name__)


def run(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Folders of reward models, two or more.")],
    output: Annotated[str, typer.Option(metavar="DIR", help="A new folder for the merged model.")],
    weights: Annotated[str | None, typer.Option(metavar="W,W", help="Share of each model; default: equal.")] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    try:
        shares = None if weights is None else [float(part) for part in weights.split(",")]
    except ValueError as error:
        need = "a number for each model, as 0.5,0.5"
        raise ConfigError("the weights are no numbers", where="--weights", got=weights, need=need) from error

    from treeward.scoring.merging import merge_models

    folder = merge_models(models, output, weights=shares, trust_remote_code=trust_remote_code)
    logger.info("Merged the weights into %s.", folder)
    return 0
