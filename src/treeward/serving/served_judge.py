"""`ServedJudge`: the judge of a server, from the completions of a prompt to their rewards.

    judge = ServedJudge(config)
    compared = await judge.compare(prompt, completions)
    compared.rewards
    await judge.cohorts.reward(rollout)        # one completion, once the others are here

The judge is a language model in this process, or behind an endpoint. A comparison without a verdict
is left out. A completion without any verdict has no reward, and then nobody has one: the rewards of
a group only mean something together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from treeward.config.served_judge import ServedJudgeConfig
from treeward.data.conversation import Message
from treeward.errors import ModelError
from treeward.scoring.group_rewards import (
    GroupCompletion,
    PairVerdict,
    group_metrics,
    mean_scores,
    pairs_of,
    with_bonuses,
)
from treeward.scoring.judge_endpoint import EndpointJudge
from treeward.scoring.judge_local import LocalJudge
from treeward.scoring.pair_scores import PairScores, read_pair_scores
from treeward.scoring.score import transcript
from treeward.scoring.verdicts import SYSTEM_PROMPT, NoVerdict, Verdict, make_question
from treeward.serving.api_error import APIError
from treeward.serving.cohorts import Cohorts, ComparedPrompt, Rollout

_EMPTY = "None"
"""What the judge sees in place of an empty answer, as in NeMo Gym."""

Question = Sequence[Message]


@dataclass(frozen=True)
class ComparedGroup:
    """The reward of each completion, every comparison, and metrics of the scores."""

    rewards: list[float]
    verdicts: list[PairVerdict]
    metrics: dict[str, float]


class ServedJudge:
    """Loads the model. Raises `ModelError` and `ConfigError` as judges do."""

    def __init__(self, config: ServedJudgeConfig) -> None:
        self.config = config
        self._judge: LocalJudge | EndpointJudge
        if config.base_url is None:
            self._judge = LocalJudge(config)
        else:
            self._judge = EndpointJudge(config)
        # One thread: a model in this process judges one group after another.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treeward-judge")
        self._slots = asyncio.Semaphore(config.max_concurrency)
        self._has_roles = bool(config.genrm_roles)
        if config.genrm_roles is None and isinstance(self._judge, LocalJudge):
            names_roles = "response_1" in self._judge.renderer.chat_template
            self._has_roles = names_roles and config.verdict == "scores"
        self.cohorts = Cohorts(config, self._rewards)
        self._num_attempts = 1 + config.genrm_parse_retries
        is_greedy = config.use_logprobs or config.temperature == 0
        if is_greedy and isinstance(self._judge, LocalJudge):
            # Asked again it would say the same.
            self._num_attempts = 1

    async def _rewards(self, rollouts: Sequence[Rollout]) -> list[float]:
        completions = [rollout.completion for rollout in rollouts]
        compared = await self.compare(rollouts[0].prompt, completions)
        return compared.rewards

    async def compare(
        self,
        prompt: ComparedPrompt,
        completions: Sequence[GroupCompletion],
    ) -> ComparedGroup:
        """The rewards of two completions or more.

        Raises `APIError`: 503 if the judge fails or a completion has no verdict, 422 if the judge
        cannot read it, 504 at the time limit.
        """
        config = self.config
        pairs = pairs_of(len(completions), config.comparison_strategy)
        # In a thread: the texts of hundreds of long pairs would hold up all other requests.
        questions = await asyncio.to_thread(self._questions, prompt, completions, pairs)
        num_judges = config.num_judges_per_comparison
        try:
            async with asyncio.timeout(config.cohort_evaluation_timeout_s):
                answers = await self._answers(questions * num_judges)
        except TimeoutError as error:
            message = "the judge has not compared the group in time (cohort_evaluation_timeout_s)"
            raise APIError(504, "deadline_exceeded", message, retry_after=1) from error
        except ModelError as error:
            raise _judge_failed(error.in_one_line) from error
        verdicts: list[PairVerdict] = []
        # All pairs were asked for the first judge, then all for the next.
        for number, answer in enumerate(answers):
            judge, place = divmod(number, len(pairs))
            scores = self._scores(answer)
            reason = answer.reason if isinstance(answer, NoVerdict) and scores is None else None
            verdicts.append(PairVerdict(*pairs[place], judge, scores, reason))
        rewards: list[float] = []
        for i, reward in enumerate(mean_scores(verdicts, len(completions))):
            if reward is None:
                failures: list[NoVerdict] = []
                for verdict, answer in zip(verdicts, answers, strict=True):
                    if i in (verdict.first, verdict.second) and isinstance(answer, NoVerdict):
                        failures.append(answer)
                raise _no_reward(i, failures)
            rewards.append(reward)
        rewards = with_bonuses(rewards, completions, config)
        return ComparedGroup(rewards, verdicts, group_metrics(verdicts))

    def close(self) -> None:
        """Judge no further group."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _questions(
        self,
        prompt: ComparedPrompt,
        completions: Sequence[GroupCompletion],
        pairs: Sequence[tuple[int, int]],
    ) -> list[Question]:
        """What the judge is asked about each pair of completions."""
        conversation = transcript(prompt.history, prompt.tools)
        questions = []
        for first, second in pairs:
            shown = (completions[first], completions[second])
            questions.append(self._question(prompt, conversation, shown))
        return questions

    def _question(
        self, prompt: ComparedPrompt, conversation: str, shown: Sequence[GroupCompletion]
    ) -> Question:
        """What the judge is asked about two completions. `conversation`: the prompt as a text."""
        config = self.config
        texts = []
        for completion in shown:
            is_empty = not completion.answer.strip()
            texts.append(_EMPTY if is_empty else completion.answer)
        principle = None
        if config.use_principle:
            principle = prompt.principle or config.default_principle
        if not self._has_roles:
            # The principle comes from whoever runs the loop, as the rest of the system prompt does.
            if principle is not None:
                system_prompt = config.system_prompt or SYSTEM_PROMPT
                system_prompt += f"\n\nJudge by this principle:\n{principle}"
                config = config.model_copy(update={"system_prompt": system_prompt})
            return make_question(config, conversation, texts)
        # The roles and their order are those of Gym's `genrm_model`.
        messages: list[Message] = list(prompt.history)
        if principle is not None and config.supports_principle_role:
            messages.append({"role": "principle", "content": principle})
        messages.append({"role": "response_1", "content": texts[0]})
        messages.append({"role": "response_2", "content": texts[1]})
        return messages

    async def _answers(self, questions: Sequence[Question]) -> list[Verdict | NoVerdict]:
        """The answer to each question; those whose message has no verdict are asked again."""
        answers: dict[int, Verdict | NoVerdict] = {}
        open_questions = list(range(len(questions)))
        for attempt in range(self._num_attempts):
            if attempt > 0:
                await asyncio.sleep(self.config.genrm_parse_retry_sleep_s)
            asked = [questions[i] for i in open_questions]
            for i, answer in zip(open_questions, await self._ask(asked), strict=True):
                answers[i] = answer
            # Without a message it was the request that failed, which the endpoint has retried.
            open_questions = []
            for i, answer in answers.items():
                if isinstance(answer, NoVerdict) and answer.text is not None:
                    open_questions.append(i)
            if not open_questions:
                break
        return [answers[i] for i in range(len(questions))]

    async def _ask(self, questions: Sequence[Question]) -> list[Verdict | NoVerdict]:
        if isinstance(self._judge, EndpointJudge):
            return await self._judge.ask_async(questions, self._slots)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._judge.ask, questions)

    def _scores(self, answer: Verdict | NoVerdict) -> PairScores | None:
        """The scores of a verdict; where the section has defaults, also those of a whole message
        without one."""
        if isinstance(answer, Verdict):
            return answer.pair_scores
        score = self.config.default_score
        ranking = self.config.default_ranking
        has_message = answer.text is not None and not answer.is_cut and answer.text.strip()
        if score is None or ranking is None or not has_message:
            return None
        read = read_pair_scores(answer.text or "", default_score=score, default_ranking=ranking)
        return read or PairScores(score, score, ranking)


def _no_reward(i: int, failures: Sequence[NoVerdict]) -> APIError:
    """Why the completion at `i` has no verdict."""
    reason = f"no comparison of completion {i} has a verdict: {failures[0].reason}"
    for failure in failures:
        # Another time the judge may write a verdict.
        if failure.is_temporary or failure.text is not None:
            return _judge_failed(reason)
    # The question itself is refused, as one that is too long.
    return APIError(422, "cannot_be_judged", reason)


def _judge_failed(reason: str) -> APIError:
    # Never a reward: a neutral one for everybody looks like a run that learns nothing.
    return APIError(503, "judge_failed", f"the judge gave no rewards: {reason}", retry_after=1)
