"""Tables of this process, saved and restored; the only part of checkpoints that needs JAX."""
