"""Checkpoints of tables: the format on disk, written and read; needs no Orbax."""
