"""``fp8tune report``: one HTML file with charts and tables of a database."""
