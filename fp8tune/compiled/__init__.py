"""What a compiled kernel tells without being run."""
