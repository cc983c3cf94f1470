#!/usr/bin/env bash
# Makes the virtual environment .venv with torch and the few packages of requirements.txt.
# A second call returns at once. After an interrupted call, run it again: it goes on from there.
#
#     bash runs/setup.sh           # what training and sampling need: 1-2 minutes and the download of torch
#     bash runs/setup.sh --test    # also what the tests need (tests/requirements.txt): 1 minute more
#
# VENV    the environment's folder (default .venv; a relative path starts at the repository's root)
# PYTHON  the interpreter to make it from (default python3); a torch 2.7 or newer that it has is used
# TORCH   what to install if it has none, as in TORCH='torch>=2.7' (default: the tested torch==2.13.0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv} PYTHON=${PYTHON:-python3}
py=$VENV/bin/python log=$VENV/setup.log
say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

files=(requirements.txt)
case "$*" in
    "") ;;
    --test) files+=(tests/requirements.txt) ;;
    *) fail "unknown argument in '$*'; the only one is --test" ;;
esac

# A file's stamp is the checksum it had when it was last installed: with nothing new, this takes milliseconds.
stamp() { echo "$VENV/stamp-${1//\//-}"; }
todo=()
for file in "${files[@]}"; do
    [ -x "$py" ] && [ "$(cat "$(stamp "$file")" 2>/dev/null)" = "$(cksum <"$file")" ] || todo+=("$file")
done
[ ${#todo[@]} -gt 0 ] || exit 0
trap 'fail "interrupted; run it again and it goes on"' INT TERM

has_torch() {  # does interpreter $1 have a torch of 2.7 or newer?
    "$1" -c 'import importlib.metadata as m, sys
sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 7))' 2>/dev/null
}
pip_install() { "$py" -m pip install --quiet --disable-pip-version-check --no-input "$@" >"$log" 2>&1; }
pip_failed() { fail "pip could not install $1: $(grep -m 1 ERROR "$log" || tail -n 1 "$log") (see $log)"; }

# 1. The environment. venv writes bin/activate last, so a folder without it is half made.
base=$PYTHON
if [ -x "$py" ] && [ -e "$VENV/bin/activate" ]; then base=$py; fi
command -v "$base" >/dev/null || fail "no $base found; install Python 3.10 or newer, or name one with PYTHON"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    fail "$base is not Python 3.10 or newer ($("$base" --version 2>&1 | head -n 1)); name one with PYTHON"
if [ "$base" != "$py" ]; then
    "$base" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$base has no venv module; install it (Debian, Ubuntu: apt install python3-venv)"
    others=$(ls -A "$VENV" 2>/dev/null | grep -vE '^(bin|include|lib|lib64)$' || true)
    [ -z "$others" ] || [ -e "$VENV/pyvenv.cfg" ] ||  # clear no folder of somebody's own
        fail "$VENV exists and is no virtual environment; move it away or name another folder with VENV"
    say "making a virtual environment in $VENV with $("$base" --version) (10 seconds)"
    error=$("$base" -m venv --clear "$VENV" 2>&1) || fail "cannot make $VENV: $(tail -n 1 <<<"$error")"
fi
[ -w "$VENV" ] || fail "no permission to write to $VENV; name another folder with VENV"
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip >"$log" 2>&1 || fail "$VENV has no pip (see $log)"
packages=$("$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# pip writes INSTALLER when a package is complete. Forget those that an interrupted call left without it.
for info in "$packages"/*.dist-info; do [ -e "$info/INSTALLER" ] || rm -rf "$info"; done

# 2. torch, alone and before all else, so that no other package can pull in another build of it. One that
#    python3 has already is shared through a .pth file, which works for a system's Python and for a venv's.
if ! has_torch "$py" && has_torch "$PYTHON"; then
    say "using the torch of $PYTHON"
    shared=$packages/torch-of-python3.pth
    "$PYTHON" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' >"$shared"
    "$py" -c 'import torch' 2>/dev/null || rm "$shared"  # made for another version of Python, or broken
fi
if ! has_torch "$py"; then
    if [ "$(uname)" = Linux ] && ! command -v nvidia-smi >/dev/null; then
        say "no NVIDIA GPU found; the default torch for Linux may be a CUDA build of several gigabytes."
        say "For the small CPU build press Ctrl-C, run these two lines, then this script again, which keeps it:"
        say "    $PYTHON -m venv $VENV"
        say "    $VENV/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu"
    fi
    want=${TORCH:-torch==2.13.0}
    say "installing $want (1-2 minutes and the download)"
    if ! pip_install "$want"; then  # no such release for an older Python or an Intel Mac: take another
        [ -z "${TORCH:-}" ] && grep -q "from versions: [0-9]" "$log" || pip_failed "$want"
        say "there is no $want for this Python: installing torch>=2.7"
        pip_install "torch>=2.7" || pip_failed "torch>=2.7"
    fi
fi

# 3. The rest.
for file in "${todo[@]}"; do
    say "installing the packages of $file (1 minute)"
    grep -v '^torch' "$file" | pip_install -r /dev/stdin || pip_failed "the packages of $file"
done
torch=$("$py" -c 'import torch; print(torch.__version__)' 2>&1 | tail -n 1) || fail "torch does not work: $torch"
for file in "${todo[@]}"; do cksum <"$file" >"$(stamp "$file")"; done
say "ready in $SECONDS seconds: $("$py" --version), torch $torch"
