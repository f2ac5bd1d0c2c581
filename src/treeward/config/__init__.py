"""The configuration of a run: a strict schema, read from YAML with references and overrides."""
