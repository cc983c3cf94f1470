#!/usr/bin/env bash
# What runs/hh.sh, runs/1gpu.sh and runs/8gpu.sh share, which source it: names of files on their command lines. HERE is
# the caller's folder; the scripts go to the project's.
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }
from_here() { case "$1" in /*) echo "$1" ;; *) echo "$HERE/$1" ;; esac; }
all_from_here() {  # names with commas between; blanks around them don't count
    tr , '\n' <<<"$1" | while read -r name; do [ -z "$name" ] || from_here "$name"; done | paste -sd , -
}
need_names() {  # need_names TEXT NAME...: TEXT's names, by commas, and the others are there, but for empty ones
    local name names
    IFS=, read -ra names <<<"$1"
    for name in ${names[@]+"${names[@]}"} "${@:2}"; do
        [ -z "$name" ] || [ -e "$name" ] || fail "$name: no such file or folder"
    done
}
need_safetensors() {  # need_safetensors FOLDER: the package, if its weights have no other form
    if compgen -G "$1/*.safetensors" >/dev/null && ! compgen -G "$1/*.bin" >/dev/null; then
        "$PY" -c "import safetensors" 2>/dev/null ||
            fail "$1: its weights are in a form that needs a package: ${PY%python}pip install safetensors"
    fi
}
