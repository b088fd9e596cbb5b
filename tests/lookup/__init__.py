"""Lookups in a loss: gradients, bags, features, prefetching."""
