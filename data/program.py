"""What the programs in data/ share: flags with one-line errors, and one-line ends."""

import argparse
import sys


def flags(doc):
    """A parser whose errors are one line, exit status 2."""
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"error: {message}; --help lists the flags\n")
    return parser


def outcome(run, args, interrupted="nothing was written"):
    """run(args); a bad file, a bad value and Ctrl-C end the program in one line, exit status 1."""
    try:
        run(args)
    except OSError as error:
        sys.exit(f"error: {error.filename or 'output'}: {error.strerror or error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"interrupted: {interrupted}")
