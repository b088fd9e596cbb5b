"""Checkpoints as folders: where they are, which tables they have, and what they build on."""
