"""Tables: their contents, and what may happen to them."""
