from __future__ import annotations

import pytest
from pydantic import ValidationError

from treeward.config.evaluation import EvaluationConfig


def test_suites_are_names_or_names_and_folders():
    config = EvaluationConfig(suites=["rewardbench", " llmbar = my data/llmbar=2 "])
    assert config.named_suites == (("rewardbench", None), ("llmbar", "my data/llmbar=2"))
    one = EvaluationConfig.model_validate({"suites": "llmbar=downloads/llmbar"})  # as evaluation.suites=... gives it
    assert one.named_suites == (("llmbar", "downloads/llmbar"),)
    assert EvaluationConfig().named_suites == () and not EvaluationConfig().enabled


@pytest.mark.parametrize("suite", ["", " ", "=folder", "llmbar=", "llmbar= ", "llmbar,rmbench", "a,b=folder"])
def test_what_is_no_suite_is_refused(suite):
    with pytest.raises(ValidationError, match=r"suites(?s:.*)not understood"):
        EvaluationConfig.model_validate({"suites": ["rewardbench", suite]})


@pytest.mark.parametrize("key", ["perturbations", "limit"])
@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_numbers_of_examples_are_positive(key, number):
    with pytest.raises(ValidationError, match=key):
        EvaluationConfig.model_validate({key: number})
