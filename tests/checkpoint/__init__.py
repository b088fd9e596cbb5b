"""The format of checkpoints."""
