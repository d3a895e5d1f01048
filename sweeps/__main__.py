"""`python -m sweeps`: what `stability-harness sweep` is."""

from sweeps.commands.sweep import main

if __name__ == "__main__":
    main()
