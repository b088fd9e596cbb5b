"""Programs over several devices, as JAX sees them; nothing of tables."""
