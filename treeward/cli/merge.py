"""`treeward merge`: the weights of several reward models, averaged into one model folder."""

from __future__ import annotations

import argparse
import importlib
import logging

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward merge results/a/final results/b/final --output results/merged
  treeward merge A B C --output merged --weights 0.5,0.25,0.25 --dtype bfloat16

Merge models that were trained from one initialisation (same pretrained weights, same head) and differ in data order,
seed or learning rate. The merged model has a scoring contract of its own and no calibration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of reward models, two or more")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder for the merged model")
    parser.add_argument("--weights", type=_numbers, metavar="W,W", help="share of each model; default: equal shares")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of the backbone on disk; default: that of the models"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the models bring")


def run(arguments: argparse.Namespace) -> int:
    pretrained = importlib.import_module("treeward.model.pretrained")
    merging = importlib.import_module("treeward.scoring.merging")
    merge = merging.merge_models(
        arguments.models,
        arguments.output,
        weights=arguments.weights,
        dtype=None if arguments.dtype is None else pretrained.DTYPES[arguments.dtype],
        trust_remote_code=arguments.trust_remote_code,
    )
    for i, (name, weight) in enumerate(zip(merge.members, merge.weights, strict=True)):
        likeness = ""
        if i:
            cosines = f"{merge.similarities[i - 1]:.4f} (backbone) and {merge.head_similarities[i - 1]:.4f} (head)"
            likeness = f", cosines {cosines} with the first"
        logger.info("%.4g of %s%s", weight, name, likeness)
    logger.info("Merged %d parameters into %s (%s).", merge.num_parameters, merge.folder, merge.dtype)
    return 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text}, need a number for each model, as 0.5,0.5") from error
