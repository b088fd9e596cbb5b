"""What JAX knows of programs over several devices; nothing of tables."""
