"""`python -m msrun` is the `msrun` command."""

from msrun.cli import main

if __name__ == "__main__":
    main()
