"""`Service`: from conversations to rewards, or to an `APIError`, for every route.

model = service.model("rm")
rewards = await service.rewards(model, [conversation, RenderedText(text)], deadline=deadline)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from treeward.config.server import ServerConfig
from treeward.data.conversation import AnyConversation
from treeward.scoring.score import Reward
from treeward.scoring.scorer import PreparedScorer
from treeward.serving.api_error import APIError
from treeward.serving.batcher import AnyBatcher, Batcher, FailedScore, ServerMetrics
from treeward.serving.models import ServedModel, load_served
from treeward.serving.rendered_text import RenderedText
from treeward.serving.running import RunningRewards
from treeward.serving.served_judge import ServedJudge

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 60
"""For accepted requests after a signal, while the server accepts no new ones."""


class Service:
    """The models, their batcher (here, or replicas elsewhere), the judge, and the server's
    metrics."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        config: ServerConfig,
        metrics: ServerMetrics,
        batcher: AnyBatcher,
    ) -> None:
        self.models = {model.name: model for model in models}
        self.config = config
        self.metrics = metrics
        self.batcher = batcher
        self.started = time.time()
        self.judge: ServedJudge | None = None
        # Only /verify normalises by what it has seen.
        self.running = RunningRewards() if config.running else None
        # Models whose clients send texts without their end: one warning is enough.
        self._warned: set[str] = set()
        metrics.watch_queue(lambda: batcher.num_queued)

    @classmethod
    def load(cls, config: ServerConfig) -> Service:
        """Load the models. Raises `ModelError` for a model that breaks its contract."""
        pairs = []
        for section in config.models:
            started = time.monotonic()
            model, scorer = load_served(section, config)
            pairs.append((model, scorer))
            seconds = time.monotonic() - started
            names = ", ".join(section.models)
            checked = "it keeps its contract"
            if model.contract_sha256 is None:
                checked = "no contract was checked"
            logger.info("%s: loaded %s in %.1f s; %s.", model.name, names, seconds, checked)
        service = cls.of(pairs, config)
        if config.judge is not None:
            service.judge = ServedJudge(config.judge)
            logger.info("%s: loaded the judge.", config.judge.model)
        return service

    @classmethod
    def of(
        cls,
        pairs: Sequence[tuple[ServedModel, PreparedScorer]],
        config: ServerConfig,
    ) -> Service:
        """A service that scores in this process."""
        metrics = ServerMetrics()
        batcher = Batcher({model.name: scorer for model, scorer in pairs}, config, metrics)
        return cls([model for model, _ in pairs], config, metrics, batcher)

    def model(self, name: str | None) -> ServedModel:
        """The model of this name, folder or hub name; the first for None. Raises `APIError` 404."""
        # Names go before folders: one model's folder may be another's name.
        if name in self.models:
            return self.models[name]
        for model in self.models.values():
            # Clients of vLLM name a model by the folder or hub name that it was loaded from.
            if name is None or [name] == list(model.members):
                return model
        if not self.models:
            message = "this server has a judge and no reward model: ask /compare or /verify"
            raise APIError(404, "model_not_found", message, param="model")
        names = ", ".join(self.models)
        message = f"no model is called {str(name)[:100]!r}; the models are: {names}"
        raise APIError(404, "model_not_found", message, param="model")

    async def rewards(
        self,
        model: ServedModel,
        inputs: Sequence[AnyConversation | RenderedText],
        *,
        deadline: float,
        shaped: bool = True,
        on_error: Literal["refuse", "mask"] = "refuse",
    ) -> list[Reward]:
        """One reward for each conversation, in order.

        `deadline`: of `time.monotonic`. `shaped`: with the model's shaping, if any. Raises
        `APIError` for too many conversations, a full queue and a deadline; and, with
        `on_error="refuse"`, for a conversation without a reward: 422 if it cannot be scored, 500 if
        the server failed. With "mask" its value is None, with the reason in `error`.
        """
        shaper = model.shaper if shaped else None
        conversations: list[AnyConversation | None] = []
        for item in inputs:
            if isinstance(item, RenderedText):
                conversations.append(item.messages)
            else:
                conversations.append(item)
        # Before anything is scored, since the request is refused as a whole.
        if shaper is not None and shaper.reads_completions and None in conversations:
            message = (
                f"text {conversations.index(None)}: this model's rewards depend on the completion, "
                "and nothing shows where it begins: send messages (/v1/rewards, or `messages` of "
                "vLLM's /classify and /pooling), or the prompt beside the text (`prompts` of "
                "/get_reward)"
            )
            raise APIError(422, "unknown_completion", message)
        texts = [item.text for item in inputs if isinstance(item, RenderedText)]
        if model.name not in self._warned:
            is_cut = any(not model.ending.is_in(text) for text in texts)
            if is_cut:
                self._warned.add(model.name)
                message = "%s: texts do not end with %a, so they are not scored as in training."
                logger.warning(message, model.name, model.ending.text)
        whole_inputs: list[AnyConversation | RenderedText] = []
        for item in inputs:
            if isinstance(item, RenderedText) and isinstance(item.text, str):
                item = replace(item, text=model.ending.begun(item.text))
            whole_inputs.append(item)
        scores = await self.batcher.score(model.name, whole_inputs, deadline=deadline)
        # Scores, not rewards: shaping differs, and a drift of the model is looked for.
        self.metrics.count(model.name, scores)
        if shaper is None:
            rewards = [Reward(score.score, score, error=score.error) for score in scores]
        else:
            rewards = shaper.shape(scores, [chat or [] for chat in conversations])
        for i, reward in enumerate(rewards):
            # The first one that has none refuses the request, so that no client takes it for a 0.
            if reward.value is None and on_error == "refuse":
                message = f"conversation {i}: {reward.error}"
                if isinstance(reward.score, FailedScore):
                    raise APIError(500, "scoring_failed", message, param=f"[{i}]")
                raise APIError(422, "cannot_be_scored", message, param=f"[{i}]")
        return rewards

    def begin_shutdown(self) -> None:
        """Answer the requests that wait for others, because no others will be accepted."""
        if self.judge is not None:
            self.judge.cohorts.close()

    def close(self) -> None:
        """Stop the batcher and the judge."""
        self.batcher.close()
        if self.judge is not None:
            self.judge.close()
