"""NeMo Gym's `genrm_compare` with treeward's judge: completions of a prompt are compared in pairs.

    gym env start --config resources_servers/genrm_compare/configs/genrm_compare.yaml --config ...

The instance's section has the keys of `judge` of `treeward serve`, which are Gym's own where Gym
has them, and these of Gym:

- `genrm_responses_create_params`: its `temperature`, `max_output_tokens` and `top_p`.
- `judge_request_timeout_s`: the timeout of a request to the judge.
- `genrm_model_server`, `cohort_result_ttl_s`, `debug_logging`: without effect.

Instead of `genrm_model_server` the section names the judge's own server by `base_url`, because only
Gym's `/v1/responses` adds the roles of a GenRM to a request.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from treeward.compat.nemo_gym import OWN_KEYS, handed_over
from treeward.config.load import load_section
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError, TreewardError
from treeward.progress import configure_logging
from treeward.serving.run import serve

_WITHOUT_EFFECT = (
    "name",
    "genrm_model_server",
    "genrm_responses_create_params",
    "judge_request_timeout_s",
    "cohort_result_ttl_s",
    "debug_logging",
)
_SAMPLING = {"temperature": "temperature", "max_output_tokens": "max_tokens"}


def main() -> int:
    """Serve until a signal; the exit code, 2 for a mistake in the configuration."""
    try:
        configure_logging()
        where, section = handed_over()
        return serve(checked(section, where))
    except TreewardError as error:
        sys.stderr.write(f"genrm_compare: {error}\n")
        return 2


def checked(section: Mapping[str, Any], where: str) -> ServerConfig:
    """NeMo Gym's section as the configuration of a server. Raises `ConfigError`, its place
    `where`."""
    judge: dict[str, Any] = {}
    for key, value in section.items():
        if key not in OWN_KEYS and key not in _WITHOUT_EFFECT:
            judge[key] = value
    address: dict[str, Any] = {}
    for key in ("host", "port"):
        if key in judge:
            address[key] = judge.pop(key)
    if judge.get("model") is None:
        raise ConfigError(
            "the judge has no model",
            where=where,
            field="model",
            got=section.get("genrm_model_server"),
            need="a folder or hub name; or base_url, and the model's name there",
            fix="set model, and base_url to the address of vLLM instead of genrm_model_server",
        )
    # Keys of the section itself go before those of Gym's nested one.
    sampling = section.get("genrm_responses_create_params") or {}
    for name, key in _SAMPLING.items():
        if sampling.get(name) is not None:
            judge.setdefault(key, sampling[name])
    if sampling.get("top_p") is not None and judge.get("base_url") is not None:
        judge["extra_body"] = {"top_p": sampling["top_p"], **judge.get("extra_body", {})}
    if section.get("judge_request_timeout_s") is not None:
        judge.setdefault("timeout_seconds", section["judge_request_timeout_s"])
    return load_section(ServerConfig, {**address, "judge": judge}, where=where)


if __name__ == "__main__":
    sys.exit(main())
