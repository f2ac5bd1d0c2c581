"""The bundled data: a small closed world of questions whose completions code can grade.

    read_rows(str(bundled_path("train")))            # the committed rows, in the rank format
    prompts("validation")[0]                         # a context to complete, as RL needs it
    gold_quality(prompts("validation")[0], "...")    # how good that completion is, in [0, 1]

`world` holds the facts and the phrases, `gold` grades any text, `generate` writes the rows. The committed files are the
output of `python -m treeward.data.synthetic treeward/data/bundled`, byte for byte.
"""

from __future__ import annotations

from treeward.data.synthetic.bundled import SPLITS, best_completions, bundled_path, prompts
from treeward.data.synthetic.generate import generate
from treeward.data.synthetic.gold import GoldQuality, Question, gold_breakdown, gold_quality, parse_question

__all__ = [
    "SPLITS",
    "GoldQuality",
    "Question",
    "best_completions",
    "bundled_path",
    "generate",
    "gold_breakdown",
    "gold_quality",
    "parse_question",
    "prompts",
]
