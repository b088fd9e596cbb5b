"""What tests share: the reference models, tables to compare, and programs of several processes."""
