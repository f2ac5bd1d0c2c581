"""A run on several processes: who they are, how the model is sharded over them, and how they are
started.

PyTorch's FSDP2 and DTensor shard, torch.distributed.checkpoint saves, torchrun or Ray Train start
them.
"""
