r"""`treeward verify`: replay the contract of a reward model or a judge, here or on a server, and
name what differs.

examples:
  treeward verify results/quickstart/final
  treeward verify results/quickstart/final --device cuda --dtype bfloat16
  treeward verify downloaded/model --write --head-weights helpfulness=1,verbosity=-0.2
  treeward verify results/quickstart/final --against http://gpu7:8001 --dialect vllm \
      --dtype bfloat16

The exit code is 0 if everything is equal, 1 if something differs, and 2 if there is nothing to
compare. The first part that differs is the cause; docs/why_different.md says what to do. With
--against, name the dtype of the server by --dtype.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeward.cli.options import (
    Device,
    Dtype,
    HeadWeightsOption,
    Model,
    TrustRemoteCode,
    parse_head_weights,
)
from treeward.client.dialects import DIALECTS, Form
from treeward.errors import ConfigError, ModelError
from treeward.tables import results_table

if TYPE_CHECKING:
    from treeward.scoring.diagnosis import Verification

logger = logging.getLogger(__name__)

_DIALECTS = ", ".join(DIALECTS)


def run(
    model: Model,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON."),
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write a contract for a folder that has none, and then check it."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --write: replace the contract."),
    ] = False,
    head_weights: HeadWeightsOption = None,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The address of a running server to check."),
    ] = None,
    dialect: Annotated[
        str | None,
        typer.Option(help=f"The API format of the server: {_DIALECTS}; default: treeward."),
    ] = None,
    served_model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The name of the model on the server; default: its first model."
        ),
    ] = None,
    send: Annotated[
        Form | None,
        typer.Option(help="What to send; bare is the text without BOS, CLS and SEP."),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(help="The environment variable that holds the server's token."),
    ] = None,
) -> int:
    # An option without an effect is a mistake: it would look like it had worked.
    if (force or head_weights) and not write:
        raise ConfigError("the option needs --write", where="--force, --head-weights")
    if against is None and (dialect or served_model or send or token_env):
        raise ConfigError(
            "the option needs --against URL",
            where="--dialect, --model, --send, --token-env",
        )
    if against is not None:
        if write or device:
            raise ConfigError("the option does not go with --against", where="--write, --device")

        # Imports that take seconds come after the checks of the options.
        from treeward.client.verification import verify_server
        from treeward.openai_client import key_from

        result = verify_server(
            model,
            against,
            dialect=dialect or "treeward",
            model=served_model,
            form=send,
            dtype=dtype,
            token=key_from(token_env),
            trust_remote_code=trust_remote_code,
        )
        _show(result, as_json=as_json)
        return 0 if result.equal else 1
    return _verify_folder(
        model,
        as_json=as_json,
        write=write,
        force=force,
        head_weights=head_weights,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
    )


def _verify_folder(
    model: str,
    *,
    as_json: bool,
    write: bool,
    force: bool,
    head_weights: str | None,
    device: str | None,
    dtype: Dtype,
    trust_remote_code: bool,
) -> int:
    """Verify a model here, after writing its contract with `write`; returns the exit code."""
    # Imports that take seconds come after the checks of the options.
    from treeward.config.reward_environments import JUDGE_FILE
    from treeward.model.pretrained import DTYPES, check_device
    from treeward.scoring.trained_judge import verify_judge
    from treeward.scoring.verification import verify

    folder = Path(model).expanduser()
    # A judge has a contract of its own kind, which --write does not make.
    if not write and (folder / JUDGE_FILE).is_file():
        judged = verify_judge(folder)
        _show(judged, as_json=as_json)
        return 0 if judged.equal else 1

    check_device(device, where="--device")
    if write:
        _write(folder, head_weights, force, device, trust_remote_code)
    result = verify(
        model,
        device=device,
        dtype=DTYPES[dtype],
        trust_remote_code=trust_remote_code,
    )
    _show(result, as_json=as_json)
    if result.first_difference is None:
        return 0
    # Without a contract that can be read there is nothing to compare.
    return 2 if result.first_difference.part == "contract" else 1


def _show(result: Verification, *, as_json: bool) -> None:
    """Every check, then the first difference, or that all is equal."""
    # The first difference is the cause; those after it may follow from it.
    first = result.first_difference
    if as_json:
        content = dataclasses.asdict(result)
        content["equal"] = result.equal
        content["first_difference"] = None if first is None else first.part
        sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        return
    rows = []
    for check in result.checks:
        rows.append({"part": check.part, "state": check.state, "finding": check.summary})
    sys.stdout.write(results_table(rows, ["part", "state", "finding"]) + "\n")
    name = result.against or result.model
    if first is not None:
        lines = [f"{name}: what differs first is the {first.part}: {first.summary}"]
        details = {"got:": first.got, "need:": first.need, "fix:": first.fix}
        for label, value in details.items():
            if value is not None:
                lines.append(f"  {label:6} {value}")
    elif result.largest_difference is None:
        lines = [f"{name}: nothing differs, but there are no golden scores to replay."]
    else:
        scores = f"{result.num_scores} golden scores, to within {result.largest_difference:.1e}"
        lines = [f"{name}: equal: {scores}; up to {result.tolerance:.1e} is rounding."]
    sys.stdout.write("\n".join(["", *lines]) + "\n")


def _write(
    folder: Path,
    weights: str | None,
    force: bool,
    device: str | None,
    trust_remote_code: bool,
) -> None:
    """Score the golden conversations here, and write a contract with them."""
    from treeward.model.contract import CONTRACT_FILE, read_contract
    from treeward.model.pretrained import choose_device
    from treeward.model.spread import refit
    from treeward.scoring.golden import sign_folder

    path = folder / CONTRACT_FILE
    head_weights = None
    if weights is not None:
        head_weights = parse_head_weights(weights)
    if path.exists() and not force:
        raise ConfigError(
            "there is a contract already",
            where=str(path),
            need="a folder without one",
            fix="verify it (without --write), or replace it (--force), which loses its old scores",
        )
    # What a readable contract says of rendering and heads is kept.
    before = None
    try:
        before = read_contract(folder)
    except ModelError as error:
        logger.warning(
            "The contract that is replaced cannot be read, so nothing of it is kept: %s",
            error.summary,
        )
    contract = sign_folder(
        folder,
        like=before,
        head_weights=head_weights,
        device=choose_device(device),
        trust_remote_code=trust_remote_code,
    )
    logger.info("Wrote %s, of %d golden conversations.", path, len(contract.golden))
    # The constants were fitted to the scores of the old contract.
    if before is not None and before.calibration is not None:
        logger.warning(
            "Its calibration is left out: treeward calibrate %s --data FILE fits a new one.",
            folder,
        )
    if before is not None and before.spread is not None:
        logger.warning("Its spread is left out: %s fits a new one.", refit(folder))
