"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold).

`analysis` makes curves, the verdict whether gold falls again, and the page; `samples` reads and scores the samples of a
file.
"""
