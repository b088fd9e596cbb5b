"""Operations as calls in a program."""
