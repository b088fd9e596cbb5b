"""Checkpoints through Orbax."""
