"""`ServedPolicy`: a server of completions as vLLM, SGLang or OpenAI has it, which samples from a real small model.

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

    As vLLM 0.32 was seen to do: with `keeps_head` (on a CPU, with tied embeddings) the output head stays as it is when
    weights are loaded; a folder that is not there, or for `sees_folders` False any, is a status 500; while blocks are
    held (`holds_blocks`) the prefix cache is not reset, and the status is 200.
    """

    def __init__(self, policy: PolicyModel | None, tokenizer: Any, *, raw: bool = False) -> None:
        self.policy, self.tokenizer, self.raw = copy.deepcopy(policy), tokenizer, raw
        self.change: Callable[[Any], Any] = lambda reply: reply
        self.version: str | None = None
        self.keeps_head = self.holds_blocks = False
        self.sees_folders = True
        self.loaded: list[dict[str, torch.Tensor]] = []
        self.lock = threading.Lock()

    def __call__(self, asked: Asked) -> Any:
        with self.lock:
            return self._completion(asked)

    def _completion(self, asked: Asked) -> Any:
        body = asked.json
        if asked.path == "/v1/completions":
            return 200, self.change(self.completions(body))
        if asked.path == "/generate":
            return 200, self.change(self.generate(body))
        if asked.path == "/update_weights_from_disk":
            self._load(body["model_path"])
            self.version = body["weight_version"]
            return 200, self.change(
                {"success": True, "message": "Succeeded to update model weights."}
            )
        if asked.path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            folder = body["kwargs"]["weights_path"]
            if not self.sees_folders or not Path(folder).is_dir():
                self.policy = None  # its weights are gone, and the next completion ends the engine
                message = f"Worker failed with error 'Repo id must be in the form 'repo_name' or ...: '{folder}'."
                error = {"type": "InternalServerError", "param": None, "code": 500}
                return 500, {
                    "error": {
                        "message": f"Call to collective_rpc method failed: {message}",
                        **error,
                    }
                }
            self._load(folder)
            return 200, {"results": [None]}
        if asked.path.partition("?")[0] == "/reset_prefix_cache":
            return 200, {"success": not self.holds_blocks}
        return 404, {"detail": "Not Found"}

    def _load(self, folder: str) -> None:
        assert [
            path.name for path in Path(folder).parent.iterdir() if path.suffix == ".partial"
        ] == []
        before = self.policy
        self.policy = PolicyModel(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        )
        if self.keeps_head and before is not None:
            self.policy.hf.lm_head = before.hf.lm_head
        self.loaded.append(self.policy.hf.state_dict())

    def _sampled(
        self, ids: list[int], most: int, seed: int, sampling: dict[str, Any]
    ) -> tuple[SampledRow, str, str]:
        ends, stops = set(sampling.get("stop_token_ids", [])) | {0}, sampling.get("stop", [])

        def ended(tokens: list[int]) -> bool:
            return tokens[-1] in ends or any(
                stop in self.tokenizer.decode(tokens) for stop in stops
            )

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
                said = (
                    self.policy.log_probs([[ids + found.token_ids]], [[len(ids)]])
                    .values_SL[0]
                    .tolist()
                )
            found.log_probs = said
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
