"""Keys, and what comes beside them in a batch: masks, steps, gradients."""
