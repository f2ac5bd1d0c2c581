"""What a run takes of its devices, before it is started: memory, communication, speed."""

import treeward.model  # noqa: F401 (it imports transformers quietly, and comes before what does not)
