"""Keys of 64 bits."""
