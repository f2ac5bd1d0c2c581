"""Rollouts of a policy behind an OpenAI-compatible address, with the rewards of a reward model; `treeward rollouts`."""
