"""The version of this package, where nothing else has to be imported for it."""

VERSION = "0.1.0"
