"""The page at `/`, on which a person tries the models: routes that give its files, and the files."""
