"""`configure`: the log of a server that the command line does not start, on standard error."""

from __future__ import annotations

import logging


def configure() -> None:
    """Send all records to standard error only: treeward's from INFO on, libraries' from WARNING on."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING, force=True)
    logging.getLogger("treeward").setLevel(logging.INFO)
    logging.captureWarnings(True)
