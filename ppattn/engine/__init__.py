"""Runs: building, training, evaluation, checkpoints and resuming, and the files that a run leaves."""
