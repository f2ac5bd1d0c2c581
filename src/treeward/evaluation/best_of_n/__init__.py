"""Best-of-n: what choosing by one score (the proxy) does to another one (the gold)."""
