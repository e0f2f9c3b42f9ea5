"""A sweep on several GPUs: units of work in the database, workers that take them, and a launcher on Ray."""
