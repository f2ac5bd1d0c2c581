"""`ServedPolicy`: a server of completions as vLLM, SGLang or OpenAI has it, which samples from a
real small model.

served = ServedPolicy(policy, tokenizer)
with Loopback(served) as loopback:
    ...                                  # a generator at loopback.url
served.policy                            # the weights that it was given last
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loopback import Asked
from transformers import AutoModelForCausalLM

from treeward.model.policy_model import PolicyModel
from treeward.rl.sampling import SampledRow, sample, uniforms

__all__ = ["ServedPolicy"]


class ServedPolicy:
    """`change(reply)` alters its responses.

    As vLLM 0.32 was seen to do:

    - with `keeps_head` (on a CPU, with tied embeddings) the output head stays as it is when weights
      are loaded;
    - a folder that is not there, or for `sees_folders` False any, is a status 500;
    - while blocks are held (`holds_blocks`) the prefix cache is not reset, and the status is 200;
    - without `is_for_developers` (VLLM_SERVER_DEV_MODE) it has no path for weights.

    A server that `ignores_weights` says that it has loaded them, and has not.
    """

    def __init__(self, policy: PolicyModel | None, tokenizer: Any, *, raw: bool = False) -> None:
        self.policy = copy.deepcopy(policy)
        self.tokenizer = tokenizer
        self.raw = raw
        self.change: Callable[[Any], Any] = lambda reply: reply
        self.version: str | None = None
        self.keeps_head = False
        self.holds_blocks = False
        self.ignores_weights = False
        self.is_for_developers = True
        self.sees_folders = True
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.lock = threading.Lock()

    def __call__(self, asked: Asked) -> Any:
        with self.lock:
            return self._reply(asked)

    def _reply(self, asked: Asked) -> Any:
        body = asked.json
        if asked.path == "/v1/completions":
            return 200, self.change(self.completions(body))
        if asked.path == "/generate":
            return 200, self.change(self.generate(body))
        if asked.path == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.version = body["weight_version"]
            reply = {"success": True, "message": "Succeeded to update model weights."}
            return 200, self.change(reply)
        if self.is_for_developers and asked.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            return self._reload(body["kwargs"]["weights_path"])
        if asked.path.partition("?")[0] == "/reset_prefix_cache":
            return 200, {"success": not self.holds_blocks}
        return 404, {"detail": "Not Found"}

    def _reload(self, folder: str) -> Any:
        if self.sees_folders and Path(folder).is_dir():
            self._load(folder)
            return 200, {"results": [None]}
        self.policy = None  # its weights are gone, and the next completion ends the engine
        cause = (
            f"Worker failed with error 'Repo id must be in the form 'repo_name' or ...: '{folder}'."
        )
        error = {
            "message": f"Call to collective_rpc method failed: {cause}",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
        return 500, {"error": error}

    def _load(self, folder: str) -> None:
        unfinished = [path for path in Path(folder).parent.iterdir() if path.suffix == ".partial"]
        assert unfinished == []
        if self.ignores_weights:
            return
        before = self.policy
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.policy = PolicyModel(model)
        if self.keeps_head and before is not None:
            self.policy.hf.lm_head = before.hf.lm_head
        self.loaded.append(self.policy.hf.state_dict())

    def _sampled(
        self, ids: list[int], most: int, seed: int, sampling: dict[str, Any]
    ) -> tuple[SampledRow, str, str]:
        ends = {0, *sampling.get("stop_token_ids", [])}
        stops = sampling.get("stop", [])

        def ended(tokens: list[int]) -> bool:
            text = self.tokenizer.decode(tokens)
            return tokens[-1] in ends or any(stop in text for stop in stops)

        assert self.policy is not None, "asked before it had weights"
        found = SampledRow(tuple(ids), most, uniforms(seed, 0, 0, most))
        sample(
            self.policy,
            [found],
            ended=ended,
            temperature=sampling["temperature"],
            top_p=sampling["top_p"],
        )
        if self.raw:
            with torch.no_grad():
                log_probs = self.policy.log_probs([[ids + found.token_ids]], [[len(ids)]])
            found.log_probs = log_probs.values_SL[0].tolist()
        text = self.tokenizer.decode(found.token_ids, skip_special_tokens=True)
        return found, text, "stop" if ended(found.token_ids) else "length"

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for g in range(body["n"]):
            found, text, reason = self._sampled(
                body["prompt"], body["max_tokens"], body["seed"] + g, body
            )
            names = [
                f"token_id:{i}" if "return_token_ids" in body else self.tokenizer.decode([i])
                for i in found.token_ids
            ]
            choice: dict[str, Any] = {
                "index": g,
                "text": text,
                "finish_reason": reason,
                "stop_reason": None,
            }
            choice["logprobs"] = None
            if body.get("logprobs") is not None:
                choice["logprobs"] = {
                    "text_offset": [0] * len(names),
                    "token_logprobs": found.log_probs,
                    "tokens": names,
                    "top_logprobs": [
                        {name: x} for name, x in zip(names, found.log_probs, strict=True)
                    ],
                }
            if body.get("return_token_ids"):
                choice |= {"token_ids": found.token_ids, "prompt_token_ids": body["prompt"]}
            choices.append(choice)
        choices = choices[1:] + choices[:1]  # in no particular order
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": choices,
        }

    def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        completions = []
        for ids, sampling in zip(body["input_ids"], body["sampling_params"], strict=True):
            found, text, reason = self._sampled(
                ids, sampling["max_new_tokens"], sampling["sampling_seed"], sampling
            )
            length = {"type": "length", "length": len(found.token_ids)}
            meta: dict[str, Any] = {
                "id": "1",
                "finish_reason": length
                if reason == "length"
                else {"type": "stop", "matched": found.token_ids[-1]},
                "prompt_tokens": len(ids),
                "completion_tokens": len(found.token_ids),
                "weight_version": self.version or "default",
            }
            if body["return_logprob"]:
                pairs = zip(found.log_probs, found.token_ids, strict=True)
                meta["output_token_logprobs"] = [[x, i, None] for x, i in pairs]
            completions.append({"text": text, "output_ids": found.token_ids, "meta_info": meta})
        return completions
