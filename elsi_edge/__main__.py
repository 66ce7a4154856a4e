"""The command `elsi-edge`, also as `python -m elsi_edge`. It imports late, so that an early Ctrl-C is quiet."""

import signal
import sys

_INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit."""
    try:
        from elsi_edge.cli import main as run

        run()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.stderr.write("interrupted\n")
        sys.exit(_INTERRUPTED)
    except SystemExit:
        # All is said and done; what is left is the interpreter's own end, where a press would only spoil the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


if __name__ == "__main__":
    main()
