"""Code around a launch: the lookup of a config, the launcher, registration as torch operators."""
