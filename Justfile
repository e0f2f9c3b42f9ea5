# Everyday commands, for an environment with `pip install -c constraints.txt -e kernels -e '.[dev]'`.

# Everything CI runs.
test *arguments:
    pytest -n 2 --dist worksteal {{arguments}}

# Formatting, import contracts, pages and project files.
lint:
    pre-commit run --all-files

# Format the code and fix what ruff can fix.
format:
    ruff format .
    ruff check --fix .

types:
    mypy

# Generated parts of README and documentation.
docs:
    python -m benchmarks.printed
