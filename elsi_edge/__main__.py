"""`python -m elsi_edge`: the command line."""

from elsi_edge.cli import main

if __name__ == "__main__":
    main()
