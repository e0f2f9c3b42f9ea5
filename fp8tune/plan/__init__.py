"""What to try: shape sets, problems, configs."""
