"""treeward trains, examines, serves and optimises against reward models; the prompt is computed once."""

__version__ = "0.1.0"
