#!/bin/sh
# Make .venv if there is none, and install what a requirements file asks for: environment.sh requirements-book.txt
set -eu
python=${PYTHON:-python3}
if ! command -v "$python" >/dev/null 2>&1; then
    echo "Python not found: install Python 3.11 or newer, or name one with PYTHON=/path/to/python" >&2; exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "Python 3.11 or newer is needed, but $python is $("$python" -V 2>&1): install a newer one, or name it with PYTHON=" >&2; exit 1
fi
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    if ! "$python" -m venv --clear .venv >/dev/null 2>&1; then
        echo "Python's venv module is missing: install it (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1
    fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -r "$1" -c constraints.txt
