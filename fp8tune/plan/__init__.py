"""Problem sizes and configs to try, from shape sets and grids."""
