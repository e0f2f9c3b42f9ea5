"""The grouped matrix multiplications, and what lays their operands out."""
