"""From a trial to its outcome, in workers that own the tensors. Knows no database and no terminal."""
