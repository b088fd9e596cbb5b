"""What is about the project as a whole: its shape, its texts, its examples, what is frozen."""
