"""`treeward bon`: what best-of-n by one or several proxies does to gold, from samples of a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from treeward.cli.options import (
    BatchTokens,
    Device,
    Dtype,
    MaxLength,
    RewardModels,
    Truncation,
    TrustRemoteCode,
    Unchecked,
    ensemble_section,
    fixed_shaping,
    loading_options,
    parse_yaml,
    scoring_options,
    write_table,
)
from treeward.config.base import nearest_name
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.progress import ShownProgress
from treeward.storage import write_text

__all__ = ["EXAMPLES", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward bon --proxy results/quickstart/final --gold other/model --data samples.jsonl --output results/bon
  treeward bon --proxy MODEL --gold "{type: rules, rule: math}" --data samples.jsonl
  treeward bon --proxy MODEL --gold gold_scores --data samples.jsonl
  treeward bon --proxy scores --gold rank --data comparisons.jsonl
  treeward bon --proxy A --proxy "{model: A, shaping: contract}" --proxy "{models: [A, B], ensemble: worst}" \
      --gold OTHER --data samples.jsonl --output results/bon

Rows hold `prompt` (text), or `context` or `messages`, with `responses` or
`completions`: N samples of one prompt. A proxy and a gold are each a reward model, a
field of the rows with a number for each sample (of preference files also `score` or
`rank`), an environment as {type: ..., ...}, which sees the row's other columns, or
`synthetic`: the gold quality of the bundled data's world. A reward model may be one of
{model: NAME} or {models: [NAME, ...], ensemble: ...}, with shaping and a name of its
own. Several proxies are compared on the same samples. With --output an interrupted run
goes on where it stopped."""

_DEFAULT_GOLD = "gold_scores"
_SYNTHETIC = "synthetic"
_RULES = ("exact_match", "math", "regex")
_MOST_REASONS = 5
_MODEL_KEYS = ("name", "model", "models", "ensemble", "shaping")


def run(
    proxy: Annotated[
        list[str],
        typer.Option(
            metavar="MODEL|YAML|FIELD",
            help="What chooses: a reward model, {model: NAME, shaping: contract}, {models: [A, B], ensemble: worst}, "
            "or as --gold. Given several times, each proxy is compared with the first.",
        ),
    ],
    data: Annotated[str, typer.Option(metavar="FILE", help="jsonl, json, csv, parquet or arrow.")],
    gold: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|YAML|FIELD",
            help="What is right: a reward model, {type: rules, rule: math}, a field of the rows, or synthetic; "
            f"default: the field {_DEFAULT_GOLD}.",
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where samples.jsonl, bon.json and a report go.")
    ] = None,
    max_n: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="The largest n; default: what 95 % of rows have.")
    ] = None,
    batch_tokens: BatchTokens = None,
    max_length: MaxLength = None,
    truncation: Truncation = None,
    unchecked: Unchecked = False,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    from treeward.data.sources import read_rows
    from treeward.evaluation.best_of_n import samples

    first = next(samples.sampled_rows(read_rows(data)))
    if gold is None and _DEFAULT_GOLD not in first.values:
        need = f"--gold, or a column {_DEFAULT_GOLD} with a number for each completion"
        raise ConfigError("nothing says what gold is", where="--gold", got=f"no {_DEFAULT_GOLD}", need=need)
    proxies = [_meaning(text, "--proxy", first) for text in proxy]
    right = _meaning(gold or _DEFAULT_GOLD, "--gold", first)
    folder = None if output is None else Path(output)
    _check(proxies, right, folder, trust_remote_code)
    # Every row is read once before anything is loaded: an error in the last one comes at once.
    fields = [samples.by_field(one.name) for one in (*proxies, right) if one.kind == "field"]
    num_rows = _survey(samples.sampled_rows(read_rows(data)), fields)
    options = loading_options(device, dtype, trust_remote_code)
    options |= scoring_options(batch_tokens, max_length, truncation, unchecked)
    scored = _scored(proxies, right, num_rows, data, folder, options)
    failed = _failures(scored)
    if len(proxies) == 1:
        from treeward.evaluation.best_of_n.analysis import analyse

        (own,) = scored.values()
        result = analyse([one.prompt for one in own], max_n=max_n)
        _show(result, right.name)
        if folder is not None:
            _write(folder, result, own, proxies[0].name, right.name, data)
    else:
        from treeward.evaluation.best_of_n.several import analyse_several

        compared = analyse_several({name: [one.prompt for one in own] for name, own in scored.items()}, max_n=max_n)
        _show_several(compared, right.name)
        if folder is not None:
            _write_several(folder, compared, scored, right.name, data)
    return 1 if failed else 0


def _check(proxies: Sequence[_Meaning], gold: _Meaning, output: Path | None, trust_remote_code: bool) -> None:
    names = [proxy.name for proxy in proxies]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        fix = "{name: ..., model: ...} gives one a name of its own"
        raise ConfigError("two proxies have one name", where="--proxy", got=twice, need="different names", fix=fix)
    for proxy in proxies:
        if proxy.meaning == gold.meaning:
            raise ConfigError("proxy and gold are the same", where="--proxy, --gold", got=proxy.name, need="two scores")
    for one in (*proxies, gold):
        if one.rewards is not None:
            one.rewards.check_alone(trust_remote_code=trust_remote_code)
    if output is not None and len(proxies) > 1 and (output / "samples.jsonl").exists():
        raise CheckpointError(
            "this folder holds the scores of one proxy alone",
            where=str(output),
            got="samples.jsonl",
            need="an empty folder, or that of a run of several proxies",
            fix="choose another --output",
        )


def _scored(
    proxies: Sequence[_Meaning],
    gold: _Meaning,
    num_rows: int,
    data: str,
    output: Path | None,
    options: Mapping[str, Any],
) -> dict[str, list[Any]]:
    """The scored rows of each proxy by its name; one proxy's model is in memory at a time, and gold is asked once."""
    from treeward.data.sources import fingerprint, read_rows
    from treeward.evaluation.best_of_n import samples

    scored: dict[str, list[Any]] = {proxy.name: [] for proxy in proxies}
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {}
        if output is not None:  # all of them before the first is scored: a folder of another run is an error at once
            digest = fingerprint(data)
            for proxy in proxies:
                folder = output / (_folder(proxy.name) if len(proxies) > 1 else "")
                identity = {"data": digest, "proxy": _identity(proxy, options), "gold": _identity(gold, options)}
                files[proxy.name] = stack.enter_context(samples.sample_file(folder, identity))
                scored[proxy.name] += files[proxy.name].kept
        for proxy in proxies:
            own = scored[proxy.name]
            known = [one for rows in scored.values() for one in rows]
            rows = samples.sampled_rows(read_rows(data))
            for one in _score(rows, num_rows, proxy, gold, options, {one.row for one in own}, known):
                if proxy.name in files:
                    files[proxy.name].add(one)
                own.append(one)
    return scored


def _survey(rows: Iterator[Any], checks: Sequence[Callable[[list[Any]], Any]]) -> int:
    """How many rows there are; raises `DataError` for one that is wrong."""
    num = 0
    for row in rows:
        num += 1
        for check in checks:
            check([row])
    return num


def _score(
    rows: Iterator[Any],
    num_rows: int,
    proxy: _Meaning,
    gold: _Meaning,
    options: Mapping[str, Any],
    done: Collection[int],
    known: Sequence[Any],
) -> Iterator[Any]:
    """The rows that are not done, as they are scored; nothing is loaded where all are. Gold is that of `known` rows."""
    from treeward.evaluation.best_of_n import samples

    if len(done) == num_rows:
        logger.info("All %d rows were scored before by %s.", num_rows, proxy.name)
        return
    if done:
        logger.info("%d of %d rows were scored before by %s.", len(done), num_rows, proxy.name)
    left = (row for row in rows if row.number not in done)
    with contextlib.ExitStack() as stack:
        of_proxy = _grader(proxy, options, stack)
        of_gold = samples.by_known(known, lambda: _grader(gold, options, stack))
        progress = stack.enter_context(ShownProgress(unit="prompts"))
        num_done = len(done)
        progress.show(proxy.name, num_done, num_rows)
        for scored in samples.score_samples(left, of_proxy, of_gold):
            yield scored
            num_done += 1
            progress.show(proxy.name, num_done, num_rows)


@dataclass(frozen=True)
class _Meaning:
    """What a proxy or gold is: `kind` is model, field, environment or synthetic.

    `section` is the environment's; `rewards`: the models, with the ensemble and the shaping that make a score of them.
    """

    kind: str
    name: str
    section: Mapping[str, Any] | None = None
    rewards: RewardModels | None = None

    @property
    def meaning(self) -> object:
        """What it is, whatever it is called."""
        one = self.rewards
        return (self.kind, self.name) if one is None else (one.models, one.ensemble, one.shaping)


def _meaning(text: str, option: str, first: Any) -> _Meaning:
    if text.lstrip().startswith("{"):
        section = parse_yaml(text, option)
        if isinstance(section, dict) and {"model", "models"} & section.keys() and "type" not in section:
            return _models(section, option)
        if not isinstance(section, dict) or not isinstance(section.get("type"), str):
            raise ConfigError(
                "the environment has no type",
                where=option,
                got=text,
                need="{type: rules, rule: math}, or another type; or {model: NAME, shaping: ...}",
            )
        return _Meaning("environment", text.strip(), section)
    from treeward.evaluation.best_of_n.samples import fields_of

    fields = fields_of(first)
    if text in fields:
        return _Meaning("field", text)
    if text == _SYNTHETIC:
        return _Meaning("synthetic", text)
    if _may_be_model(text):
        return _Meaning("model", text, rewards=RewardModels((text,), where=option))
    if text in _RULES:
        return _Meaning("environment", text, {"type": "rules", "rule": text})
    near = nearest_name(text, [*fields, _SYNTHETIC, *_RULES])
    raise ConfigError(
        "this is no model, no environment and no field of the rows",
        where=option,
        got=text,
        need="a folder or hub name; {type: rules, rule: math}; synthetic; or a field with a number for each response"
        + (f": {', '.join(fields)}" if fields else f"; the first row ({first.where}) has none"),
        fix=f"did you mean {near}?" if near else None,
    )


def _models(section: Mapping[str, Any], option: str) -> _Meaning:
    """Reward models as {model: A} or {models: [A, B], ensemble: worst}, with `shaping` and `name`."""
    for key in section:
        if key not in _MODEL_KEYS:
            near = nearest_name(str(key), _MODEL_KEYS)
            need = f"one of {', '.join(_MODEL_KEYS)}"
            fix = f"did you mean {near}?" if near else None
            raise ConfigError("there is no such key", where=option, field=str(key), got=key, need=need, fix=fix)
    given = section.get("models", [section.get("model")])
    if {"model", "models"} <= section.keys() or not isinstance(given, list) or not given:
        need = "model: NAME, or models: [NAME, ...]"
        raise ConfigError("the models are not named", where=option, got=dict(section), need=need)
    for name in given:
        if not isinstance(name, str) or not _may_be_model(name):
            raise ConfigError("this is no model", where=option, got=name, need="a folder or hub name")
    if len(given) > 1 and section.get("ensemble") is None:
        fix = "add ensemble: mean, worst or uncertainty"
        raise ConfigError("nothing says how their scores become one", where=option, got=given, need="ensemble", fix=fix)
    ensemble = None if section.get("ensemble") is None else ensemble_section(section["ensemble"], f"{option}, ensemble")
    where = f"{option}, shaping"
    shaping = fixed_shaping(section.get("shaping"), where)
    name = ", ".join(given) if ensemble is None else f"{ensemble.method} of {', '.join(given)}"
    if shaping is not None:
        name += f", shaped: {_one_line(section['shaping'])}"
    if not isinstance(section.get("name", name), str):
        raise ConfigError("the name is not text", where=option, field="name", got=section["name"], need="text")
    return _Meaning("model", section.get("name", name), rewards=RewardModels(tuple(given), ensemble, shaping, where))


def _one_line(section: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("\n").removesuffix("\n...").strip()


def _may_be_model(text: str) -> bool:
    return Path(text).expanduser().exists() or ("/" in text and not text.startswith((".", "/", "~")))


def _grader(meaning: _Meaning, options: Mapping[str, Any], stack: contextlib.ExitStack) -> Any:
    """What grades samples; `stack` shuts an environment down."""
    from treeward.evaluation.best_of_n import samples

    if meaning.kind == "field":
        return samples.by_field(meaning.name)
    if meaning.kind == "synthetic":
        return samples.by_gold_quality()
    if meaning.kind == "environment":
        from treeward.environments.registry import make_environment

        environment = make_environment("rules", meaning.section or {}, where=meaning.name)
        stack.callback(environment.shutdown)
        return _by_environment(environment, samples.Grade)
    assert meaning.rewards is not None
    return samples.by_scorer(meaning.rewards.load_rewards(options))


def _by_environment(environment: Any, grade: Callable[..., Any]) -> Callable[[Sequence[Any]], list[list[Any]]]:
    def of_rows(rows: Sequence[Any]) -> list[list[Any]]:
        conversations = [conversation for row in rows for conversation in row.conversations]
        infos = [row.info for row in rows for _ in row.conversations]
        grades = (grade(reward.value, reward.error) for reward in environment.rewards(conversations, infos))
        return [[next(grades) for _ in row.conversations] for row in rows]

    return of_rows


def _identity(meaning: _Meaning, options: Mapping[str, Any]) -> str:
    """What decides the scores: a run that was interrupted goes on only if it is the same."""
    rewards = meaning.rewards
    if rewards is None:
        return f"{meaning.kind} {meaning.name}"
    models = [_model_identity(name) for name in rewards.models]
    how = f"{options['dtype']} {options.get('max_length')} {options.get('truncation')}".removeprefix("torch.")
    if rewards.ensemble is None and rewards.shaping is None:
        return f"{models[0]} {how}"
    shaping = rewards.shaping
    settings = {
        "models": models,
        "ensemble": None if rewards.ensemble is None else rewards.ensemble.model_dump(mode="json"),
        "shaping": shaping if shaping is None or isinstance(shaping, str) else shaping.model_dump(mode="json"),
        "contracts": [_constants(name) for name in rewards.models],
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return f"{meaning.name} {digest} {how}"


def _model_identity(name: str) -> str:
    from treeward.model.contract import read_contract

    contract = read_contract(name)
    folder = Path(name).expanduser()
    if contract is not None:
        return f"contract {contract.scores_sha256}"
    if folder.is_dir():
        states = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        return f"{name} {[(file, state.st_size, state.st_mtime_ns) for file, state in states]}"
    return name


def _constants(name: str) -> object:
    """What of a model's contract decides rewards and no score: its shaping, and the constants that were fitted."""
    from treeward.model.contract import read_contract

    contract = read_contract(name)
    if contract is None:
        return None
    shaping, known = contract.reward_shaping, contract.calibration
    return {
        "shaping": None if shaping is None else shaping.model_dump(mode="json"),
        "calibration": None if known is None else known.model_dump(mode="json", exclude={"provenance"}),
    }


def _folder(name: str) -> str:
    """A folder for a proxy of that name; a name that is no good one has a digest in it, so that no two share one."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def _show(result: Any, gold: str) -> None:
    from treeward.evaluation.best_of_n import blocks

    write_table(blocks.table_rows(result), blocks.table_columns(result))
    sys.stdout.write(f"{blocks.legend(gold)}\n\n{result.verdict.sentence}\n")
    _tell_fewer(result)


def _show_several(compared: Sequence[Any], gold: str) -> None:
    from treeward.evaluation.best_of_n import several_blocks
    from treeward.evaluation.best_of_n.blocks import legend

    write_table(several_blocks.by_size(compared), several_blocks.by_size_columns(compared))
    sys.stdout.write("\n")
    write_table(several_blocks.by_proxy(compared), several_blocks.by_proxy_columns(compared))
    verdicts = "\n".join(f"{one.name}: {one.result.verdict.sentence}" for one in compared)
    sys.stdout.write(f"{legend(gold)}\n\n{verdicts}\n")
    _tell_fewer(compared[0].result)


def _tell_fewer(result: Any) -> None:
    fewer = result.counts["num_prompts_with_fewer_samples"]
    if fewer:
        logger.warning("%d prompts have fewer than %d scored samples and are left out.", fewer, result.max_n)


def _write(output: Path, result: Any, scored: Sequence[Any], proxy: str, gold: str, data: str) -> None:
    from treeward.evaluation.best_of_n import blocks

    content = {"proxy": proxy, "gold": gold, "data": data} | blocks.to_json(result)
    _write_files(output, content, proxy, blocks.blocks(result, proxy, gold), blocks.examples(scored, proxy), gold, data)


def _write_several(
    output: Path, compared: Sequence[Any], scored: Mapping[str, Sequence[Any]], gold: str, data: str
) -> None:
    from treeward.evaluation.best_of_n import blocks, several_blocks

    content = {"gold": gold, "data": data, "proxies": several_blocks.several_to_json(compared)}
    examples = [row for name, own in scored.items() for row in blocks.examples(own, name)]
    shown = several_blocks.blocks_of_several(compared, gold)
    _write_files(output, content, f"{len(compared)} proxies", shown, examples, gold, data)


def _write_files(
    output: Path,
    content: Mapping[str, Any],
    title: str,
    shown: Sequence[Mapping[str, Any]],
    examples: Sequence[Mapping[str, Any]],
    gold: str,
    data: str,
) -> None:
    from treeward.evaluation.best_of_n.blocks import EXAMPLES_SOURCE
    from treeward.evaluation.report.build import write_report

    path = output / "bon.json"
    try:
        write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
        report = write_report(
            output, f"Best of n: {title}", shown, {EXAMPLES_SOURCE: examples}, subtitle=f"gold: {gold}; samples: {data}"
        )
    except OSError as error:
        raise DataError(
            "the result cannot be written", where=str(output), got=str(error), need="a folder that can be written"
        ) from error
    logger.info("Wrote %s and %s.", path, report)


def _failures(scored: Mapping[str, Sequence[Any]]) -> int:
    """How many scores are missing, told by their reasons; what gold lacks is counted once, as it is the same."""
    errors: dict[str, Counter[str]] = {}
    for number, (name, own) in enumerate(scored.items()):
        prefix = "" if len(scored) == 1 else f"{name}, "
        for one in own:
            for reason, count in one.errors.items():
                of_gold = reason.startswith("gold: ")
                if not of_gold or number == 0:
                    errors.setdefault("" if of_gold else prefix, Counter())[reason] += count
    from treeward.evaluation.running import common_reasons

    # Each proxy by itself: names may differ in a number alone.
    reasons = [(prefix + reason, count) for prefix, one in errors.items() for reason, count in common_reasons(one)]
    reasons.sort(key=lambda pair: -pair[1])
    for reason, count in reasons[:_MOST_REASONS]:
        logger.warning("%d samples are left out: %s", count, reason)
    if rest := reasons[_MOST_REASONS:]:
        logger.warning("%d samples are left out for %d other reasons.", sum(count for _, count in rest), len(rest))
    return sum(count for _, count in reasons)
