"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold).

    result = analyse([SampledPrompt(proxy=scores_of_a_model, gold=scores_of_a_better_one), ...])

`expectation` is the mathematics of choosing, `analysis` makes curves and the verdict whether
gold falls again, `samples` reads and scores the samples of a file, and `blocks` shows the result.
"""
