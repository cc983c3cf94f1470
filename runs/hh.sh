#!/usr/bin/env bash
# A preference model on Anthropic's real comparisons (HH-RLHF), from tokens to the report.
#
#   bash runs/hh.sh --hh FOLDER                        files of HH-RLHF; fetch them: data/download.py
#   bash runs/hh.sh --hh FOLDER --text FOLDER --forum FILE --hhh FILE
#   bash runs/hh.sh --hh FOLDER --gpt2 FOLDER          from GPT-2's weights and tokens (a GPU's work;
#                                                      data/download.py --gpt2 fetches them)
#
#   --text NAMES    more text to pretrain on: .txt, .jsonl files or folders, commas between
#   --forum FILE    answers with votes (a StackExchange dump as JSON lines): PM pretraining
#   --hhh FILE      the HHH comparisons, for the report
#   --size mini     model size      --steps 1000  of pretraining      --out out/hh  folder
#
# On two cores under 40 minutes with the two test files of HH-RLHF (4,642 usable comparisons), a
# tenth of which, by first prompt, is held out. Stop and start it as you like.
set -euo pipefail
HERE=$PWD
cd "$(dirname "$0")/.."
. runs/names.sh

HH="" TEXT="" FORUM="" HHH="" GPT2="" SIZE=mini STEPS=1000 OUT=out/hh
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || fail "$1 needs a value; the first lines of runs/hh.sh list the flags"
    case "$1" in
        --hh) HH=$(from_here "$2") ;;
        --text) TEXT=$(all_from_here "$2") ;;
        --forum) FORUM=$(from_here "$2") ;;
        --hhh) HHH=$(from_here "$2") ;;
        --gpt2) GPT2=$(from_here "$2") ;;
        --size) SIZE=$2 ;;
        --steps) STEPS=$2 ;;
        --out) OUT=$2 ;;
        *) fail "unknown flag $1; the first lines of runs/hh.sh list the flags" ;;
    esac
    shift 2
done
[ -n "$HH" ] || fail "--hh FOLDER is missing: files of HH-RLHF (python data/download.py fetches them)"
need_names "$TEXT" "$HH" "$FORUM" "$HHH" "$GPT2"

bash runs/setup.sh
PY="${VENV:-.venv}/bin/python"
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-1000}"

# Rows to comparisons; what is dropped, by reason; train and test share no first prompt. 5 seconds.
"$PY" data/hh.py "$HH" --out "$OUT/data" --test 0.1

# A base model: English and the training dialogues through a BPE of their own (20 minutes), or GPT-2.
if [ -n "$GPT2" ]; then
    "$PY" sample.py --import-hf "$GPT2" --tokenizer "$GPT2" --out "$OUT/base"
else
    "$PY" pretrain.py --text "${TEXT:+$TEXT,}$OUT/data/train.jsonl" --vocab 4096 --size "$SIZE" \
        --context 512 --batch 16 --micro 4 --steps "$STEPS" --lr 2e-3 --out "$OUT/base"
fi

# PM pretraining on votes (4 minutes), then the comparisons themselves (8 minutes); one epoch each.
INIT=$OUT/base
if [ -n "$FORUM" ]; then
    "$PY" data/forum.py "$FORUM" --out "$OUT/forum.jsonl"
    "$PY" preference.py --init "$INIT" --data "$OUT/forum.jsonl" --test "$OUT/data/test.jsonl" \
        --pairs 0 --lr 3e-4 --micro 4 --out "$OUT/pmp"
    INIT=$OUT/pmp
fi
"$PY" preference.py --init "$INIT" --data "$OUT/data/train.jsonl" --test "$OUT/data/test.jsonl" \
    --pairs 0 --lr 3e-4 --micro 4 --out "$OUT/pm"

# The report: accuracy beside the longer and the shorter answer, calibration, and more. 1 minute.
"$PY" analyze.py --pm "$OUT/pm" --data "$OUT/data/test.jsonl" ${HHH:+--hhh "$HHH"} --gender \
    --out "$OUT/report" ${RECORD:+--record "$RECORD"}
