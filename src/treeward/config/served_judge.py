"""`ServedJudgeConfig`: the judge of `treeward serve`, which compares the completions of a prompt.

judge:
  model: Qwen/Qwen3-8B
  use_logprobs: true
  num_rollouts_per_prompt: 16
  comparison_strategy: circular

The keys of a group's rewards have the names and defaults of NeMo Gym's `genrm_compare`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.reward_environments import TrainedJudgeConfig


class ServedJudgeConfig(TrainedJudgeConfig):
    """The judge, and how its verdicts about pairs become the rewards of a group."""

    mode: Literal["pairwise"] = "pairwise"
    """A served judge compares pairs."""
    verdict: Literal["label", "scores"] = "scores"
    """The form of a verdict. `scores`: `{"score_1": 4, "score_2": 3, "ranking": 2}` in JSON.
    `label`: `[[A]]`, `[[B]]` or `[[C]]`, which count as scores from 5 and 1 to 1 and 5."""
    genrm_roles: bool | None = None
    """Show the completions as messages of the roles `response_1` and `response_2`, as the templates
    of NVIDIA's GenRMs read them, in place of a question. None: if the chat template of a model in
    this process names `response_1`; not at an endpoint, which keeps its template."""
    supports_principle_role: bool = True
    """With these roles: whether the template knows the role `principle`."""
    num_rollouts_per_prompt: PositiveInt = 1
    """The rollouts of a prompt that `/verify` waits for. 1: there is nothing to compare."""
    comparison_strategy: Literal["circular", "all_pairs"] = "circular"
    """`circular`: each completion with the next, and the last with the first. `all_pairs`: every
    two, the earlier one at the first place."""
    num_judges_per_comparison: PositiveInt = 1
    """How often each pair is judged. More than once needs a temperature above 0."""
    use_principle: bool = False
    """Show the judge a principle: that of the request, or `default_principle`."""
    default_principle: str = (
        "Judge how good each response is by itself before you compare them. First work out what a "
        "good response has to say, and look for mistakes. A good response is correct, follows the "
        "instructions, keeps to the question, and is as long as the question needs."
    )
    """The principle of a request without one, in our words; NeMo Gym has a longer one."""
    aggregator_method: Literal["simple_tiebreaker"] = "simple_tiebreaker"
    """A completion's reward is the mean of its scores; between equal scores the ranking counts."""
    reasoning_bonus: NonNegativeFloat = 0.0
    """Added to the shortest reasoning of the group, if its reward is among the best."""
    answer_bonus: NonNegativeFloat = 0.0
    """Added to the shortest answer of the group, if its reward is among the best."""
    top_percentile: float = Field(default=0.2, ge=0.0, le=1.0)
    """The share of the group that is among the best."""
    group_reasoning_length_penalty_coeff: NonNegativeFloat = 0.0
    """Most that a short reasoning gains over a long one."""
    group_answer_length_penalty_coeff: NonNegativeFloat = 0.0
    """Most that a short answer gains over a long one."""
    group_style_penalty_coeff: NonNegativeFloat = 0.0
    """Most that a plain answer gains over one full of headers, lists, bold text and emoji."""
    default_score: float | None = Field(default=None, ge=1.0, le=5.0)
    """What stands for a score that the judge did not write, and for the reward of a completion
    without others; NeMo Gym has 3.0. None: nothing does, and there is no verdict."""
    default_ranking: float | None = Field(default=None, ge=1.0, le=6.0)
    """What stands for a ranking that the judge did not write; NeMo Gym has 3.5. None: nothing
    does."""
    genrm_parse_retries: NonNegativeInt = 3
    """How often a question is asked again whose message has no verdict; a judge that writes the
    same each time is asked once."""
    genrm_parse_retry_sleep_s: NonNegativeFloat = 0.2
    """Seconds before it is asked again."""
    cohort_collection_timeout_s: PositiveFloat = 1800.0
    """Seconds from the first rollout of a prompt in which the others have to come; later all of
    them get an error."""
    cohort_evaluation_timeout_s: PositiveFloat = 1800.0
    """Seconds that the judge may take for a group; later its rollouts get an error."""
    max_terminal_cohorts: PositiveInt = 4096
    """Groups with a `_ng_group_id` whose rewards are kept for requests that are sent again."""
    on_error: Literal["refuse", "mask"] = "refuse"
    """What a rollout of `/verify` gets when there is no reward. `refuse`: an error. `mask`: status
    200 with `mask_sample`, which keeps NeMo Gym's collection going."""

    def check(self) -> None:
        super().check()
        if self.genrm_roles and self.verdict == "label":
            raise self.error("genrm_roles verdict", "verdict: scores, which these models write")
        is_same_each_time = self.use_logprobs or self.temperature == 0
        if self.num_judges_per_comparison > 1 and is_same_each_time:
            need = "a temperature above 0 without use_logprobs: else each verdict is the same"
            raise self.error("num_judges_per_comparison temperature use_logprobs", need)
        if (self.default_score is None) != (self.default_ranking is None):
            raise self.error("default_score default_ranking", "both or neither")
