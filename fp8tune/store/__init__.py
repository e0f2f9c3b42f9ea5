"""The results database. Knows no GPU and no terminal."""
