"""Examples, to be run in the root of the repository."""
