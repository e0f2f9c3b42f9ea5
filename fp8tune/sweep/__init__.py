"""From what a user asked for to rows: the loop of trials, and the finals."""
