"""What a run takes of its devices, before it is started: memory, communication, speed."""
