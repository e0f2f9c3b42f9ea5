"""Pictures of what a database holds: one HTML file, or SVG files. Reads rows, needs no GPU and no network."""
