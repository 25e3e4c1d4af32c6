"""`python -m edgekv` is the `edgekv` command."""

from edgekv.cli import main

if __name__ == "__main__":
    main()
