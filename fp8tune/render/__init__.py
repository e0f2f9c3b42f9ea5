"""What people and programs are shown: tables, progress, JSON. All of it, and nothing else."""
