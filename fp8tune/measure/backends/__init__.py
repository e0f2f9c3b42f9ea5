"""Back ends, on which arms run: a GPU, the interpreter, the compiler alone, and a simulated GPU."""
