"""Generators behind HTTP, whose servers sample from a real small model, and whether a sampler has
all weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from sampled import ENDS, IDS, PROMPTS, assert_sampled_from, completions_of, moved, sequences_of
from served_policy import ServedPolicy

from treeward.config.grpo_policy import GenerationConfig
from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import GenerationError
from treeward.rl.http_generation import HttpGenerator
from treeward.rl.sampling import SampledRow, sample, uniforms
from treeward.rl.served_generation import CompletionRequest, Served, ServedGenerator


@contextmanager
def serving(
    policy: PolicyModel,
    tokenizer: Any,
    *,
    backend: Any = "vllm",
    raw: bool = False,
    **settings: Any,
) -> Iterator[tuple[HttpGenerator, ServedPolicy, Loopback]]:
    served = ServedPolicy(policy, tokenizer, raw=raw)
    with Loopback(served) as loopback:
        made = HttpGenerator(
            policy, tokenizer, section(loopback.url, backend=backend, **settings), end_ids=ENDS
        )
        yield made, served, loopback
        made.close()
        made.close()


def section(url: str = "http://x", **values: Any) -> GenerationConfig:
    common = {
        "backend": "vllm",
        "model": "m",
        "timeout_seconds": 20.0,
        "max_new_tokens": 12,
        "weight_folder": "absent",
    }
    return GenerationConfig(url=url, **(common | values))


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    """Where weights travel."""
    return {"weight_folder": str(tmp_path / "weights")}


@pytest.mark.parametrize(("backend", "temperature"), [("vllm", 1.0), ("sglang", 0.6)])
def test_completions_are_the_tokens_that_the_server_sampled(
    policy: PolicyModel, tiny_tokenizer: Any, backend: str, temperature: float
) -> None:
    with serving(
        policy, tiny_tokenizer, backend=backend, temperature=temperature, max_new_tokens=6
    ) as (
        generator,
        served,
        loopback,
    ):
        groups = generator.generate(PROMPTS, IDS, num_completions=4, seed=1)
        assert_sampled_from(policy, groups, temperature=temperature)
        for completion in completions_of(groups):
            kept = completion.token_ids if completion.truncated else completion.token_ids[:-1]
            assert completion.text == tiny_tokenizer.decode(kept, skip_special_tokens=True)
        assert len({a.truncated for a in completions_of(groups)}) == 2
        assert generator.generate(PROMPTS, IDS, num_completions=4, seed=1) == groups
        opened = [replace(prompt, opening="<think>") for prompt in PROMPTS]
        for group, plain in zip(
            generator.generate(opened, IDS, num_completions=4, seed=1), groups, strict=True
        ):
            texts = [f"<think>{completion.text}" for completion in plain.completions]
            assert [conversation[-1]["content"] for conversation in group.conversations] == texts
        other = generator.generate(PROMPTS, IDS, num_completions=4, seed=2)
        assert other != groups
        for asked in loopback.requests[-3:]:  # the completions are in the server's order, by index
            body = asked.json
            if backend == "vllm":
                ids = body["prompt"]
                reply = served.completions(body)["choices"]
                reply.sort(key=itemgetter("index"))
                want = [tuple(choice["token_ids"]) for choice in reply]
            else:
                ids = body["input_ids"][0]
                want = [tuple(part["output_ids"]) for part in served.generate(body)]
            (group,) = (group for group in other if group.prompt_ids == tuple(ids))
            assert [completion.token_ids for completion in group.completions] == want


def test_what_a_server_has_defaults_of_its_own_for_is_said(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    with serving(policy, tiny_tokenizer, stop_strings=("x y",)) as (generator, _, loopback):
        generator.generate(PROMPTS[:1], IDS[:1], num_completions=2, seed=1)
        assert loopback.requests[0].json.items() >= {
            "prompt": IDS[0], "n": 2, "max_tokens": 12, "temperature": 1.0, "top_p": 1.0,
            "top_k": -1, "min_p": 0.0,
            "repetition_penalty": 1.0, "stop": ["x y"], "stop_token_ids": ENDS, "logprobs": 1,
            "return_token_ids": True, "model": "m",
        }.items()  # fmt: skip
    with serving(policy, tiny_tokenizer, backend="sglang", top_p=0.9, top_k=7) as (
        generator,
        _,
        loopback,
    ):
        generator.generate(PROMPTS[:1], IDS[:1], num_completions=3, seed=1)
        body = loopback.requests[0].json
        assert body["input_ids"] == [IDS[0]] * 3 and body["return_logprob"] is True
        assert len({sampling["sampling_seed"] for sampling in body["sampling_params"]}) == 3
        want = {"max_new_tokens": 12, "top_p": 0.9, "top_k": 7, "stop_token_ids": ENDS}
        assert body["sampling_params"][0].items() >= want.items()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"prompt_token_ids": [5, 6, 7, 9]}, "another prompt than was sent"),
        ({"index": 1}, r"indices \[1, 1\]"),
        ({"logprobs": {"token_logprobs": [-1.0] * 99}}, "99 log-probabilities for"),
        ({"logprobs": {"token_logprobs": [None]}}, "log_probs"),
        ({"logprobs": None}, "TypeError"),
        ({"token_ids": None}, "text without token ids"),
        ({"token_ids": [10**9]}, "token ids up to 1000000000"),
        ({"finish_reason": "abort"}, "finish_reason"),
    ],
)
def test_what_was_not_asked_for_is_not_learnt_from(
    policy: PolicyModel, tiny_tokenizer: Any, wrong: Any, what: str
) -> None:
    def changed(reply: Any) -> Any:
        return {"choices": [choice | wrong for choice in reply["choices"]]}

    with serving(policy, tiny_tokenizer) as (generator, served, _):
        served.change = changed
        with pytest.raises(GenerationError, match=f"(?s)does not fit the request.*row 0.*{what}"):
            generator.generate(PROMPTS[:1], IDS[:1], num_completions=2, seed=1)


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_another_number_of_completions_than_was_asked_for_is_refused(
    policy: PolicyModel, tiny_tokenizer: Any, backend: str
) -> None:
    def one_less(reply: Any) -> Any:
        if backend == "sglang":
            return reply[:-1]
        return {"choices": [choice for choice in reply["choices"] if choice["index"] != 2]}

    with serving(policy, tiny_tokenizer, backend=backend) as (generator, served, _):
        served.change = one_less
        with pytest.raises(GenerationError, match="2 completions instead of 3"):
            generator.generate(PROMPTS[:1], IDS[:1], num_completions=3, seed=1)


def test_output_ids_other_than_those_of_the_log_probabilities_are_refused(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    def changed(reply: Any) -> Any:
        for part in reply:
            part["output_ids"] = [i + 1 for i in part["output_ids"]]
        return reply

    with serving(policy, tiny_tokenizer, backend="sglang") as (generator, served, _):
        served.change = changed
        with pytest.raises(
            GenerationError, match="output_ids are others than those of output_token_logprobs"
        ):
            generator.generate(PROMPTS[:1], IDS[:1], num_completions=2, seed=1)


def test_a_trimmed_stop_token_was_sampled_nevertheless(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    with serving(policy, tiny_tokenizer, backend="sglang") as (generator, served, _):
        want = generator.generate(PROMPTS, IDS, num_completions=1, seed=1)
        served.change = lambda reply: reply[0] | {"output_ids": reply[0]["output_ids"][:-1]}
        assert generator.generate(PROMPTS, IDS, num_completions=1, seed=1) == want


def test_an_end_token_at_the_limit_ends_the_completion(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    def at_limit(reply: Any) -> Any:
        # SGLang looks at the number of tokens before it looks at the last one.
        for part in reply:
            meta = part["meta_info"]
            meta["finish_reason"] = {"type": "length", "length": meta["completion_tokens"]}
        return reply

    options: dict[str, Any] = {"backend": "sglang", "temperature": 0.6, "max_new_tokens": 6}
    with serving(policy, tiny_tokenizer, **options) as (generator, served, _):
        want = generator.generate(PROMPTS, IDS, num_completions=4, seed=1)
        assert len({completion.truncated for completion in completions_of(want)}) == 2
        served.change = at_limit
        assert generator.generate(PROMPTS, IDS, num_completions=4, seed=1) == want


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_weights_by_a_folder(
    policy: PolicyModel, tiny_tokenizer: Any, backend: str, tmp_path: Path, folder: dict[str, Any]
) -> None:
    """Its folder keeps the version that the server has, nothing of a run that was killed, and what
    is not ours."""
    for name in ("version-of-mine", "version-1", "version-12"):
        (tmp_path / "weights" / name / "model").mkdir(parents=True)
    strict: dict[str, Any] = folder | {"probe_tolerance": 1e-3}
    with serving(policy, tiny_tokenizer, backend=backend, **strict) as (generator, _, loopback):
        for version in (1, 2):
            changed = moved(policy, 0.1 * version)
            generator.load_weights(changed, version)
            assert {path.name for path in (tmp_path / "weights").iterdir()} == {
                f"version-{version}",
                "version-of-mine",
            }
            (group,) = generator.generate(PROMPTS[:1], IDS[:1], num_completions=1, seed=1)
            own = changed.log_probs([sequences_of(group)], [[len(IDS[0])]]).values_SL[0].detach()
            assert torch.allclose(own, torch.tensor(group.completions[0].log_probs), atol=1e-4)
        paths = [asked.path for asked in loopback.requests]
        assert ("/update_weights_from_disk" in paths) == (backend == "sglang")
        cache_reset = "/reset_prefix_cache?reset_running_requests=true" in paths
        assert ("/collective_rpc" in paths and cache_reset) == (backend == "vllm")
    (tmp_path / "weights" / "version-3").mkdir()
    with serving(policy, tiny_tokenizer, backend=backend, **strict):
        pass  # it was killed after its last step, and has nothing to write any more
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-of-mine"]


def test_weights_that_the_server_ignored_stop_the_run(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    with serving(policy, tiny_tokenizer, backend="sglang", **folder) as (generator, served, _):
        served.ignores_weights = True
        with pytest.raises(GenerationError, match=r"(?s)not those of the policy.*version 4"):
            generator.load_weights(moved(policy, 0.3), 4)


def test_weights_that_sglang_could_not_load_stop_the_run(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    with serving(policy, tiny_tokenizer, backend="sglang", **folder) as (generator, served, _):
        served.change = lambda reply: {"success": False, "message": "no such folder"}
        with pytest.raises(GenerationError, match="no such folder"):
            generator.load_weights(policy, 5)


def test_vllm_without_a_path_for_weights_stops_the_run(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    with serving(policy, tiny_tokenizer, **folder) as (generator, served, _):
        served.is_for_developers = False
        with pytest.raises(GenerationError, match="VLLM_SERVER_DEV_MODE"):
            generator.load_weights(policy, 1)


def test_vllm_that_does_not_see_the_folder_stops_the_run_at_once(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    message = r"(?s)500: .*Repo id must be.*does not see the folder"
    with serving(policy, tiny_tokenizer, **folder) as (generator, served, loopback):
        served.sees_folders = False
        with pytest.raises(GenerationError, match=message) as raised:
            generator.load_weights(policy, 1)
        assert "VLLM_SERVER_DEV_MODE" not in str(raised.value)
        # it is asked once
        assert [asked.path for asked in loopback.requests] == ["/collective_rpc"]


def test_a_prefix_cache_that_vllm_kept_stops_the_run(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    with serving(policy, tiny_tokenizer, **folder) as (generator, served, _):
        served.holds_blocks = True
        with pytest.raises(GenerationError, match=r"(?s)reset_prefix_cache.*'success': False"):
            generator.load_weights(policy, 1)


def test_weights_that_arrived_in_part_stop_the_run(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    """As vLLM on a CPU keeps the output head of a model with tied embeddings; after each change, on
    other prompts."""
    with serving(policy, tiny_tokenizer, **folder) as (generator, served, loopback):
        generator.load_weights(moved(policy, 0.002), 1)
        served.keeps_head = True
        with pytest.raises(
            GenerationError, match=r"(?s)not those of the policy.*nats.*version 2.*at most 0.001"
        ):
            generator.load_weights(moved(policy, 0.004), 2)
        prompts = [
            tuple(asked.json["prompt"])
            for asked in loopback.requests
            if asked.path == "/v1/completions"
        ]
        assert len(set(prompts)) == len(prompts) > 20


def test_other_temperatures_show(
    policy: PolicyModel, tiny_tokenizer: Any, folder: dict[str, Any]
) -> None:
    with (
        serving(policy, tiny_tokenizer, raw=True, temperature=0.5, **folder) as (generator, _, _),
        pytest.raises(GenerationError, match="--logprobs-mode processed_logprobs"),
    ):
        generator.load_weights(policy, 0)
    with serving(policy, tiny_tokenizer, raw=True, temperature=0.5, top_p=0.9, **folder) as (
        generator,
        _,
        _,
    ):
        generator.load_weights(policy, 0)  # neither of vLLM's are of use here
        completions = completions_of(generator.generate(PROMPTS, IDS, num_completions=2, seed=1))
        assert all(one.log_probs is None for one in completions)


class Samplers(ServedGenerator):
    """One for each of `policies`, which take turns, as the engines that a run starts."""

    policies: Sequence[PolicyModel]

    def ask(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[Served]]:
        rows = [
            SampledRow(tuple(one.prompt_ids), one.most, uniforms(one.seed, 0, 0, one.most))
            for one in requests
        ]
        for number, policy in enumerate(self.policies):
            sample(
                policy,
                rows[number :: len(self.policies)],
                ended=self.reader.has_ended,
                temperature=1.0,
            )
        return [
            [Served(token_ids=row.token_ids, log_probs=row.log_probs, finish_reason="length")]
            for row in rows
        ]


@pytest.fixture
def samplers(policy: PolicyModel, tiny_tokenizer: Any) -> Samplers:
    made = Samplers(
        policy, tiny_tokenizer, GenerationConfig(backend="sglang", url="http://x"), end_ids=[0]
    )
    made.version, made.num_samplers = 1, 2
    return made


def difference(samplers: Samplers, policy: PolicyModel, policies: Sequence[PolicyModel]) -> float:
    """In nats, from the error; 0 where there is none."""
    samplers.policies = policies
    try:
        samplers.compare(policy, where="here")
    except GenerationError as error:
        match = re.search(
            r"a mean difference of (\S+) nats, after the weights of version 1", str(error)
        )
        assert match is not None
        return float(match[1])
    return 0.0


def test_one_of_several_samplers_with_stale_weights_is_enough(
    samplers: Samplers, policy: PolicyModel
) -> None:
    stale = moved(policy, 0.003)
    assert difference(samplers, policy, [policy, policy]) == 0.0
    first, second = (
        difference(samplers, policy, pair) for pair in ([stale, policy], [policy, stale])
    )
    assert min(first, second) > 1e-3 and difference(samplers, policy, [stale, stale]) == max(
        first, second
    )
