"""The command `elsi-edge`, also as `python -m elsi_edge`. It imports late, so that an early Ctrl-C is quiet."""

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from elsi_edge.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
