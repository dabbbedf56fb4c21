"""Runs the command line for `python -m tconv_swap`."""

from tconv_swap.cli import main

if __name__ == "__main__":
    main()
