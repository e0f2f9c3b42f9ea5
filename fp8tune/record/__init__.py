"""Watch a program's Triton launches, from inside its own processes."""
