"""A device's own noise, measured and kept."""
