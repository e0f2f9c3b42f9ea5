# Everyday commands, for an environment with `pip install -c constraints.txt -e kernels -e '.[dev]'`.

# Everything CI runs.
test *arguments:
    pytest -n 2 --dist worksteal {{arguments}}

# Lint, and what may import what.
lint:
    ruff check .
    lint-imports

# Write the code as the formatter wants it.
format:
    ruff format .
    ruff check --fix .

types:
    mypy

# The documentation, every warning an error: build/docs/index.html.
docs:
    sphinx-build -W -n -q docs build/docs
