"""Run the command `liger-hw`, which is in the laboratory, `liger_lab`."""

import sys


def main() -> int | None:
    """Run the command of the laboratory, the one import that leads to it."""
    try:
        from liger_lab import cli
    except ModuleNotFoundError as error:
        if error.name != "liger_lab":
            raise
        sys.exit("liger-hw: its commands are in another package: pip install 'liger_hw[lab]'")
    return cli.main()


if __name__ == "__main__":  # the processes that compile import this file again
    sys.exit(main())
