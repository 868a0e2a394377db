"""What keeps the chapters in order; each module is a command: python -m tools.<verb> --help."""
