"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold).

`analysis` makes curves and the verdict whether gold falls again, `samples` reads and scores the samples of a file, and
`page` shows the result.
"""
