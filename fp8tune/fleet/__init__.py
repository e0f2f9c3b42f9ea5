"""A sweep on many GPUs: its work in units, which workers take from the database. What starts the workers is above."""
