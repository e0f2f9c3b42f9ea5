"""From evidence to picks and verdicts. Pure: no database, no GPU, no clock."""
