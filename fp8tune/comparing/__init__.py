"""A verdict between two git revisions."""
