"""Rows from elsewhere: other databases, archives, published measurements, and configs that others tuned."""
