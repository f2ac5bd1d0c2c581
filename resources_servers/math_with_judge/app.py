"""Mathematics as a resources server of NeMo Gym: a rule checks the answer first, and a judge what
the rule finds wrong.

    gym env start --config resources_servers/math_with_judge/configs/math_with_judge.yaml

The rule is math-verify's, in processes of its own. A right answer by it is right; for any other,
and for one that the rule cannot read, a language model says in both orders whether it is equivalent
to the row's `expected_answer`. Both read what comes after the reasoning.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from omegaconf import OmegaConf
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from treeward.compat.nemo_gym import (
    OWN_KEYS,
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
    merged_config,
)
from treeward.data.reasoning import without_reasoning
from treeward.data.responses_items import conversation_of
from treeward.environments.registry import make_environment
from treeward.environments.source import RewardSource
from treeward.errors import ConfigError, ModelError
from treeward.scoring.score import completion_text


class MathWithJudgeConfig(BaseResourcesServerConfig):
    """The server's section."""

    should_use_judge: bool = True
    """False: the rule alone."""
    judge_model_server: dict[str, str] | None = None
    """`{type: responses_api_models, name: NAME}`: one of NeMo Gym's model servers as the judge."""
    judge: dict[str, Any] = Field(default_factory=dict)
    """Keys of the judge environment, as `base_url`, `model` and `api_key_env` of a judge
    elsewhere."""
    judge_responses_create_params: dict[str, Any] = Field(default_factory=dict)
    """`temperature` and `max_output_tokens` of the judge."""
    strip_reasoning: bool = True
    """Take off the reasoning (`<think>...</think>`) within a message; an item of the type
    `reasoning` never counts."""
    library_verifier_timeout_seconds: PositiveFloat = 10.0
    """Time limit of the rule for one answer."""
    library_verifier_max_concurrency: PositiveInt = 2
    """Processes of the rule."""

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        for key in (self.model_extra or {}).keys() - set(OWN_KEYS):
            need = f"one of {', '.join(MathWithJudgeConfig.__annotations__)}"
            raise ConfigError("there is no such key", field=key, need=need)
        return self

    def environment(self) -> dict[str, Any]:
        """The section of the environment that gives the rewards."""
        library: dict[str, Any] = {"type": "math", "answer_key": "expected_answer"}
        library |= {"timeout_seconds": self.library_verifier_timeout_seconds}
        library |= {"workers": self.library_verifier_max_concurrency}
        library |= {"strip_reasoning": self.strip_reasoning}
        members: dict[str, dict[str, Any]] = {"library": library}
        if self.should_use_judge:
            judge: dict[str, Any] = {"mode": "equivalence", "reference_key": "expected_answer"}
            if self.judge_model_server is not None:
                judge |= {
                    "base_url": model_server_url(self.judge_model_server["name"]),
                    "model": "judge",
                }
                judge |= {"api_key_env": None}
            names = {"temperature": "temperature", "max_output_tokens": "max_tokens"}
            given = self.judge_responses_create_params
            judge |= {names[key]: given[key] for key in names if given.get(key) is not None}
            members["judge"] = {"type": "judge", **judge, **self.judge}
        return {"mode": "fallback", "members": members}


def model_server_url(name: str) -> str:
    """The address of one of NeMo Gym's model servers, for OpenAI's API. Raises `ConfigError`."""
    servers = OmegaConf.select(merged_config(), f"{name}.responses_api_models") or {}
    for server in servers.values():
        return f"http://{server.host}:{server.port}/v1"
    need = "the name of a server in NAME.responses_api_models of the configuration"
    raise ConfigError(
        "there is no such model server", field="judge_model_server.name", got=name, need=need
    )


class MathVerifyRequest(BaseVerifyRequest):
    """A rollout of a problem with a known answer."""

    expected_answer: str


class MathVerifyResponse(BaseVerifyResponse):
    """A rollout with its reward and the parts of it; the judge's is None where it was not asked."""

    expected_answer: str
    reward_components: dict[str, float]
    library_reward: float | None = None
    judge_reward: float | None = None


class MathWithJudge(SimpleResourcesServer):
    """A rule first, a judge as fallback."""

    config: MathWithJudgeConfig

    def model_post_init(self, context: Any) -> None:
        """Start the rule's processes."""
        super().model_post_init(context)
        self.environment = make_environment("hybrid", self.config.environment())
        self.rewards = RewardSource(self.environment)

    def close(self) -> None:
        """End the rule's processes."""
        self.environment.shutdown()

    async def verify(self, body: MathVerifyRequest) -> MathVerifyResponse:  # type: ignore[override]
        """The reward of a rollout; rollouts that come together are checked together."""
        given = body.model_dump(mode="json")
        messages = conversation_of(body.responses_create_params.model_dump(), body.response.output)
        completion = completion_text(messages)
        if self.config.strip_reasoning and completion is not None:
            # Here, and not in the rule alone: the judge would find the answer in the reasoning.
            messages[-1] = messages[-1] | {"content": without_reasoning(completion)}
        reward = await asyncio.wrap_future(self.rewards.submit(messages, given))
        if reward.value is None:
            raise ModelError("the answer has no verdict", got=reward.error)
        components = {name.replace("/", "_"): value for name, value in reward.components.items()}
        library, judge = (reward.components.get(name) for name in ("library", "judge"))
        verdict = {"reward": reward.value, "reward_components": components}
        return MathVerifyResponse(
            **given | verdict | {"library_reward": library, "judge_reward": judge}
        )


if __name__ == "__main__":
    MathWithJudge.run_webserver()
