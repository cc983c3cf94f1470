#!/usr/bin/env bash
# Runs the tests; the first call sets itself up (runs/setup.sh --test).
#
#     bash runs/test.sh                            # under 5 minutes on 2 cores
#     bash runs/test.sh --all                      # the slow ones too
#     bash runs/test.sh tests/test_model.py -x     # any argument of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash runs/setup.sh --test

select="not slow" paths=tests
for arg in "$@"; do
    shift
    if [ "$arg" = --all ]; then select=""; continue; fi
    if [ -e "${arg%%::*}" ]; then paths=; fi  # named files or folders stand in for tests/
    set -- "$@" "$arg"
done
exec "${VENV:-.venv}/bin/python" -m pytest -m "$select" "$@" ${paths:+"$paths"}
