"""The memory that a run takes of its devices, before it is started."""
