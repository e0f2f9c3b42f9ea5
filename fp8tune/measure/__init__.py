"""Trials and their outcomes, in workers that own the tensors. Knows no database and no terminal."""
