"""Tables over the devices of a mesh."""
