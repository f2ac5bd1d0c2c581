"""The page at `/` for trying the models: its files and their routes."""
