"""From evidence to the generated table of an arch."""
