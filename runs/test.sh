#!/usr/bin/env bash
# Runs the tests; the first call sets itself up (runs/setup.sh --test).
#
#     bash runs/test.sh                            # under 5 minutes on 2 cores
#     bash runs/test.sh --all                      # the slow ones too, as in .ci/run
#     bash runs/test.sh --long                     # and all that is left: more ranks, kills, hangs
#     bash runs/test.sh tests/test_model.py -x     # any argument of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash runs/setup.sh --test

# Two at a time; each has one thread, since more don't pay at these sizes.
select="not slow and not long" paths=tests many="-n 2 --dist loadfile"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"
for arg in "$@"; do
    shift
    if [ "$arg" = --all ]; then select="not long"; continue; fi
    if [ "$arg" = --long ]; then select=""; continue; fi
    if [ -e "${arg%%::*}" ]; then paths= many=; fi  # named files or folders stand in for tests/
    set -- "$@" "$arg"
done
exec "${VENV:-.venv}/bin/python" -m pytest $many -m "$select" "$@" ${paths:+"$paths"}
