"""Shared by tests: models, runs of the loop and of commands, references."""
