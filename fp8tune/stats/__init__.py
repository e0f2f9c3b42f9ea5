"""Statistics of tuning: pure functions and records that know no database, device, table or terminal."""
