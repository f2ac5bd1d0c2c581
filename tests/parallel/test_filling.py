"""A model that is filled after it was made is refused where one process refuses to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import tiny_model

from treeward.errors import ModelError
from treeward.model.loading import load_classifier


@pytest.mark.parametrize("labels", [(), ("helpful", "brief"), ("a", "b", "c", "d")])
def test_a_head_of_another_shape_is_refused_and_not_drawn_anew(
    labels: tuple[str, ...], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """As one process refuses it; a head of one row less is no embedding without its row for
    padding."""
    tiny_model("llama", num_labels=3).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    for on_meta in (False, True):
        with pytest.raises(ModelError, match="the weights do not have the shapes"):
            load_classifier(tmp_path, head_seed=3, labels=labels, on_meta=on_meta).model.fill("cpu")
