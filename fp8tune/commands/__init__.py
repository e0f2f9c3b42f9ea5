"""One file a command: its options, what it calls and what it prints. Heavy imports live inside the functions."""
