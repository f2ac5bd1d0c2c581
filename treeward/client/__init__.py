"""Asking reward servers over HTTP: ours through `RewardClient`, and any of them whether it keeps a scoring contract.

`http` sends requests, again where that may help and never beyond their time; `rewards` is the client of `treeward
serve`; `dialects` is how other servers are asked; `verification` replays a contract on one of them.
"""
