"""``python -m fp8tune``."""

from fp8tune.cli import main

if __name__ == "__main__":
    main()
