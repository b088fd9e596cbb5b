"""Ways to look rows up in models: gradients, bags, several features, prefetch."""
