"""Clients of reward servers: `rewards` for `treeward serve`, `dialects` and `verification` for any
server.
"""
