#!/bin/sh
# Make .venv if there is none, and install what a requirements file asks for: environment.sh requirements-book.txt
set -eu
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "Python not found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python" >&2; exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    echo "Python 3.11 or newer is needed, and $python is none: install it, or name it with PYTHON=/path/to/python" >&2; exit 1
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    if ! said=$("$python" -m venv --clear .venv 2>&1) || ! [ -x .venv/bin/python ]; then
        echo "$python -m venv .venv failed (on Debian and Ubuntu it needs: apt-get install python3-venv): $(echo "$said" | tail -n 1)" >&2; exit 1
    fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$1" -c constraints.txt
