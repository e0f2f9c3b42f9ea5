"""What may be wrong: with this machine, the database and the tables (doctor), with a kernel's lookup key (lint)."""
